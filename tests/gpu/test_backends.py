"""On a CUDA GPU: greedy tokens of ours are those of fixed-length verification, whatever attention runs it, and how.

Needs no network: SMOLLM2 and SMOLLM2_DRAFT name the folders of the pair where they cannot be made here. Each server
serves for one test (about half a minute each); ``-k fa3`` runs one backend. The step costs are made up, so that every
batch is trimmed on any GPU, with drafts to most requests and few to some.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from greedy_answers import ask, assert_no_worse, drafting
from server import Server, speculative

from sglang_adaptive.benchmarks.equality import Agreement, agreement

pytestmark = pytest.mark.gpu

BACKENDS = ("fa3", "flashinfer", "triton")
MODES = {"graphs": (), "eager": ("--disable-cuda-graph",)}
SCHEDULES = {"overlap": (), "sync": ("--disable-overlap-schedule",)}
COMMON = ("--max-running-requests", "128", "--cuda-graph-max-bs-decode", "128", "--max-total-tokens", "60000")
TRITON_PACKED = Path(__file__).parents[1] / "triton_packed.py"
TASKS = ("Explain", "Write a poem about", "List facts about", "Write a Python function about", "Tell a story about")
TOPICS = (
    *(
        "rivers",
        "prime numbers",
        "bread",
        "the moon",
        "a lost key",
        "sorting",
        "bees",
        "an old bridge",
        "rain",
        "chess",
    ),
    *("trains", "volcanoes", "honey", "a lighthouse", "fractions", "winter", "glass", "maps", "tea", "a letter"),
)
PROMPTS = [f"{task} {topic}." for task in TASKS for topic in TOPICS]
TOKENS = 128


class Reference(NamedTuple):
    ids: list[list[int]]
    control: Agreement


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    named = os.environ.get("SMOLLM2"), os.environ.get("SMOLLM2_DRAFT")
    if all(named):
        return Path(named[0]), Path(named[1])
    return request.getfixturevalue("smollm2_pair")


@pytest.fixture(params=[(backend, mode) for backend in BACKENDS for mode in MODES], ids="-".join, scope="module")
def reference(request: pytest.FixtureRequest, pair: Any, log_dir: Path) -> Iterator[tuple[str, str, Reference]]:
    """What the host's static DSPARK says with this attention, all prompts at a time; and how far it agrees with itself
    at four at a time."""
    backend, mode = request.param
    target, draft = pair
    arguments = [*speculative(draft, "DSPARK"), "--attention-backend", backend, *MODES[mode], *COMMON]
    with Server(target, *arguments, log_dir=log_dir) as server:
        together = ask(server, PROMPTS, TOKENS, len(PROMPTS))
        control = agreement(together, ask(server, PROMPTS, TOKENS, 4))
    yield backend, mode, Reference(together, control)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_greedy_tokens_are_those_of_fixed_verification(reference, schedule, pair, log_dir, tmp_path, record_property):
    backend, mode, stock = reference
    target, draft = pair
    environment = drafting(tmp_path, SGLANG_ADAPTIVE_COST_CORRECTION="off", ADAPTIVE_TEST_COSTS="dear")
    arguments = [*speculative(draft), "--attention-backend", backend, *MODES[mode], *SCHEDULES[schedule], *COMMON]
    with Server(target, *arguments, log_dir=log_dir, environment=environment) as server:
        found = agreement(stock.ids, ask(server, PROMPTS, TOKENS, len(PROMPTS)))
        decisions, log = server.adaptive_state()["decisions"], server.log_text()
    assert "step costs are made up" in log
    record_property("ours", str(found))
    record_property("stock against itself", str(stock.control))
    print(f"\n{backend} {mode} {schedule}: ours {found}; stock against itself {stock.control}; {decisions}")
    if (backend, mode) == ("flashinfer", "graphs"):
        # One logged reason, and nothing trimmed: a backend that cannot verify a different number per request.
        assert log.count("verifies every draft token") == 1 and not decisions["trimmed"]
    else:
        assert "verifies every draft token" not in log
        assert decisions["trimmed"] > 20, decisions
    assert_no_worse(found, stock.control, TOKENS)


def test_triton_attends_from_packed_rows_as_it_should():
    """Its kernel, and its metadata in real CUDA graphs, without a server: look here first when the test above fails."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(TRITON_PACKED)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    cases = {name: case for name, case in found.items() if name.startswith(("eager", "graph"))}
    # TF32 products.
    wrong = {
        name: case
        for name, case in cases.items()
        if case["error"] > 1e-2 or not case["padding_is_finite"] or not case.get("same_memory", True)
    }
    assert found["device"] == "cuda" and len(cases) > 20 and wrong == {}
