"""The kernels of packed rows, interpreted, against the host's torch versions; and when they are in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreted import found_by
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_adaptive.patches import packed_rows as patches
from sglang_adaptive.runtime import packed_rows

SCRIPT = Path(__file__).parents[1] / "packed_cases.py"


@pytest.fixture(scope="module")
def found() -> dict:
    """What the script found under Triton's interpreter, which must be asked for before the host is imported."""
    return found_by(SCRIPT)


@pytest.mark.parametrize(
    ("what", "least"), [("windows, usual", 50), ("windows, unusual", 15), ("paddings", 1000), ("geometries", 20)]
)
def test_they_make_what_the_host_makes(found, what, least):
    cases = found[what]
    assert len(cases) >= least and [name for name, equal in cases.items() if not equal] == []


def test_they_are_patched_in_where_rows_are_packed_on_a_gpu_only(found):
    assert found["patched"] == [False, False, True]


def test_a_step_pads_its_layout_once_and_never_takes_another_step_s(found):
    assert found["remembered"]["launches of a step"] == [1, 1, 1]
    assert found["remembered"]["launches of a step in two graphs"] == 1
    assert found["remembered"]["correct"] == [True] * 15
    assert found["remembered"]["lengths written in place"] == [True, True]


def test_what_they_do_not_take_is_the_host_s(found):
    handed = found["handed over"]
    assert handed.pop("as usual") is False
    assert "cannot hold this batch's requests" in handed.pop("more requests than slots")
    assert handed == {"columns first": True, "too few drafts": True, "fewer requests": True}


def test_tensors_on_a_cpu_are_the_host_s():
    """Where no interpreter was asked for."""
    lens = torch.ones(2, dtype=torch.int32)
    layout = RaggedVerifyLayout.from_verify_lens_device(verify_lens=lens, graph_num_tokens=4)
    assert not packed_rows.runs_on(lens)
    assert patches._pad(lambda *_, **arguments: arguments, layout, padded_bs=3) == {"padded_bs": 3, "cap": None}
    assert patches._geometry(lambda **_: "the host", seq_lens=lens, layout=layout) == "the host"
