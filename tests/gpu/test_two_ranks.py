"""On two CUDA GPUs: tensor-parallel ranks decide alike, whatever one of them hears, profiles or measures by itself."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import tiny_language as language
from greedy_answers import ask, assert_no_worse, drafting
from server import Server, speculative

from sglang_adaptive.benchmarks.equality import agreement

pytestmark = pytest.mark.gpu

# FA3 knows no float32, in which the pair is kept.
COMMON = ("--tp", "2", "--dtype", "bfloat16", "--max-running-requests", "64", "--mem-fraction-static", "0.3")
PROMPTS = language.random_prompts(48, seed=11)
TOKENS = 256


@pytest.mark.parametrize("backend", ["fa3", "triton"])
def test_a_rank_that_drifts_decides_like_the_other(backend, tiny_pair, tmp_path, log_dir):
    """Rank 1's confidences are turned around, tokens cost it nothing in its profile and by its clock."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    target, draft = tiny_pair
    arguments = [*COMMON, "--attention-backend", backend]
    with Server(target, *speculative(draft, "DSPARK"), *arguments, log_dir=log_dir) as server:
        expected = ask(server, PROMPTS, TOKENS, len(PROMPTS))
        control = agreement(expected, ask(server, PROMPTS, TOKENS, 4))
    environment = drafting(tmp_path, RANK_DRIFT_DIR=str(tmp_path))
    with Server(target, *speculative(draft), *arguments, log_dir=log_dir, environment=environment) as server:
        found = agreement(expected, ask(server, PROMPTS, TOKENS, len(PROMPTS)))
        for at_a_time in (1, 3, 17):
            ask(server, PROMPTS, TOKENS, at_a_time)
        state = server.adaptive_state()
    assert [rank["rank"] for rank in state["ranks"]] == [0, 1] and all(rank["active"] for rank in state["ranks"])

    steps, faults = noted(tmp_path / "steps-0.jsonl"), noted(tmp_path / "fault-1.jsonl")
    kinds = Counter(fault["in_"] for fault in faults)
    assert kinds["profile"] > 10 and min(kinds["confidence"], kinds["clock"]) > 300, kinds
    other = noted(tmp_path / "steps-1.jsonl")
    assert len(steps) == len(other) > 300
    different = [(mine, theirs) for mine, theirs in zip(steps, other, strict=True) if mine != theirs]
    trimmed = [step for step in steps if step["draft"] and not step["uniform"]]
    print(f"\n{backend}: {len(different)} of {len(steps)} steps differ, {len(trimmed)} trimmed; ours {found}; ", end="")
    print(f"stock against itself {control}")
    assert not different, f"{len(different)} of {len(steps)} steps differ, first: {different[0]}"
    assert len(trimmed) > 100 and len({tuple(step["verify_lens"]) for step in trimmed}) > 20
    assert_no_worse(found, control, TOKENS)


def noted(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
