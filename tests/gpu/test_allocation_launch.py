"""On a CUDA GPU: the compiled kernel of the allocation against the policy's, and what it saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[1] / "allocation_cases.py"


@pytest.fixture(scope="module")
def found() -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**environment, "SGLANG_PLUGINS": "none"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


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
