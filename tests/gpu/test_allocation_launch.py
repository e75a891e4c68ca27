"""On a CUDA GPU: the compiled kernel of the allocation against the policy's, and what it saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from interpreted import found_by

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[1] / "allocation_cases.py"


@pytest.fixture(scope="module")
def found() -> dict:
    return found_by(SCRIPT, interpreted=False)


def test_all_that_is_claimed_of_it_holds(found):
    complaints = {claim: complaint for claim, complaint in found["claims"].items() if complaint}
    assert found["claims"] and not complaints, "\n".join(complaints.values())


def test_no_step_waits_for_a_compilation(found):
    """What is compiled ahead serves every batch, budget, limit, weight and calibration."""
    ahead, after = found["compiled ahead"]
    assert ahead == after == 8


def test_it_is_one_launch_and_takes_the_cpu_less_than_the_compiled_one(found):
    print(json.dumps({name: found[name] for name in ("seconds ahead", "costs")}))
    costs = found["costs"]
    assert all(ours == 1 for _, ours in costs["launches"].values())
    assert all(ours < theirs for theirs, ours in costs["microseconds"].values())
