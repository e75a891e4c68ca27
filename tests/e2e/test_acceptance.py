"""Simulated acceptance on real servers with random weights: every arm meets the stated fates, and ours trims."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import costs
import numpy as np
import pytest
from server import Server, speculative

from sglang_adaptive.benchmarks import acceptance, shapes
from sglang_adaptive.benchmarks.acceptance import Fates, request_key

pytestmark = pytest.mark.e2e

FILE = Path(acceptance.__file__).parent / "acceptance_files" / "code-weak.toml"
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(10, 1000, RNG.integers(8, 24)).tolist() for _ in range(24)]
TOKENS = 120


@contextmanager
def simulating(algorithm: str, folder: Path, log_dir: Path, **environment: str) -> Iterator[Server]:
    target, draft = shapes.write("small", folder)
    arguments = [*speculative(draft, algorithm), "--load-format", "dummy", "--skip-tokenizer-init"]
    arguments += ["--max-running-requests", "12", "--max-total-tokens", "8192"]
    server = Server(target, *arguments, log_dir=log_dir, environment={acceptance.VARIABLE: str(FILE), **environment})
    server._command[server._command.index("sglang.launch_server")] = "sglang_adaptive.benchmarks.acceptance_server"
    with server:
        assert "ACCEPTANCE IS SIMULATED" in server.log_text()
        (state,) = server.server_info()["internal_states"]
        assert state["bench_acceptance"]["name"] == "code-weak"
        yield server


def expected_steps(gamma: int) -> list[int]:
    """Steps that each prompt's request takes where everything is verified, by the file alone."""
    fates = Fates(acceptance.read(FILE), gamma, len(PROMPTS), "cpu")
    fates.admit(range(len(PROMPTS)), [request_key(prompt) for prompt in PROMPTS])
    steps = []
    for slot, prompt in enumerate(PROMPTS):
        at, produced, count = len(prompt), 1, 0
        while produced < TOKENS:
            taken = 1 + int(fates._run[slot, at % acceptance.POSITIONS])
            at, produced, count = at + taken, produced + taken, count + 1
        steps.append(count)
    return steps


def test_the_hosts_fixed_length_meets_exactly_the_stated_fates(tmp_path, log_dir):
    with simulating("DSPARK", tmp_path, log_dir) as server:
        answers = server.generate(PROMPTS, TOKENS, temperature=1.0, ignore_eos=True)
        steps = [answer["meta_info"]["spec_verify_ct"] for answer in answers]
        greedy = server.generate(PROMPTS[:4], TOKENS, temperature=0.0, ignore_eos=True)
    expected = expected_steps(7)
    # Overlapped, the host may launch one step more than a request needs.
    assert all(0 <= found - wanted <= 1 for found, wanted in zip(steps, expected, strict=True)), (steps, expected)
    assert len(set(expected)) > 5
    found = [answer["meta_info"]["spec_verify_ct"] for answer in greedy]
    assert all(0 <= one - other <= 1 for one, other in zip(found, expected[:4], strict=True))
    histogram = np.sum(
        [np.pad(h := a["meta_info"]["spec_correct_drafts_histogram"], (0, 8 - len(h))) for a in answers], 0
    )
    reached = histogram[::-1].cumsum()[::-1]
    for place, rate in enumerate(acceptance.read(FILE).kinds[0].rates[:3]):
        assert reached[place + 1] / reached[place] == pytest.approx(rate, abs=0.06)


def test_ours_trims_by_the_simulated_confidences_and_loses_few_tokens(tmp_path, log_dir):
    with simulating("DSPARK_ADAPTIVE", tmp_path, log_dir, **costs.environment(tmp_path)) as server:
        server.generate(PROMPTS, TOKENS, temperature=1.0, ignore_eos=True)
        state = server.adaptive_state()
    assert state["decisions"]["trimmed"] > 50, state["decisions"]
    verified, accepted = (np.array(state[f"{what}_per_position"]) for what in ("verified", "accepted"))
    assert (accepted <= verified).all() and verified[6] < 0.7 * verified[0]
    assert state["verify_length"] < 5 < 8
    full = sum(expected_steps(7))
    # What was left out was unlikely: few more steps than with everything verified, and no fewer.
    assert full <= state["requests"] + len(PROMPTS) and state["requests"] < 1.5 * full
    # A verified first draft is a likely one.
    rate = acceptance.read(FILE).kinds[0].rates[0]
    assert accepted[0] / verified[0] > rate - 0.03
