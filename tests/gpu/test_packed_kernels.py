"""On a CUDA GPU: the compiled kernels of packed rows against the host's torch versions, and what they save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from interpreted import found_by

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[1] / "packed_cases.py"


@pytest.fixture(scope="module")
def found() -> dict:
    return found_by(SCRIPT, interpreted=False)


@pytest.mark.parametrize("what", ["windows, usual", "windows, unusual", "paddings", "geometries"])
def test_they_make_what_the_host_makes(found, what):
    assert found[what] and [name for name, equal in found[what].items() if not equal] == []


def test_no_step_waits_for_a_compilation(found):
    """What is compiled ahead serves every number of requests, rows and slots."""
    ahead, after = found["compiled ahead"]
    assert ahead == after == 3


def test_a_step_pads_its_layout_once_and_never_takes_another_step_s(found):
    assert found["remembered"]["launches of a step"] == [1, 1, 1]
    assert all(found["remembered"]["correct"]) and found["remembered"]["lengths written in place"] == [True, True]


def test_each_is_one_launch(found):
    print(json.dumps(found["costs"]))
    assert [ours for _, ours in found["costs"]["launches"].values()] == [1, 1, 1]
    assert all(hosts > ours for hosts, ours in found["costs"]["launches"].values())
