"""Tensor-parallel ranks decide alike, whatever one of them hears, profiles or measures by itself."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import costs
import pytest
from conftest import PROMPTS, TOKENS
from server import Server, speculative

pytestmark = pytest.mark.e2e

ROUNDS = ((24, 1), (3, 2), (1, 3), (8, 2), (2, 3))


def noted(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_rank_that_drifts_decides_like_the_others(tiny_pair, tmp_path, log_dir, expected_ids):
    """Rank 1's confidences are turned around, tokens cost it nothing in its profile and by its clock."""
    target, draft = tiny_pair
    environment = costs.environment(tmp_path, cost_correction="on", calibration="on")
    environment["RANK_DRIFT_DIR"] = str(tmp_path)
    with Server(target, *speculative(draft), "--tp", "2", log_dir=log_dir, environment=environment) as server:
        for requests, times in ROUNDS:
            ids = server.greedy_ids(PROMPTS[:requests], times * TOKENS)
            assert [found[:TOKENS] for found in ids] == expected_ids[:requests]
        state = server.adaptive_state()
    assert [rank["rank"] for rank in state["ranks"]] == [0, 1] and all(rank["active"] for rank in state["ranks"])

    steps = [noted(tmp_path / f"steps-{rank}.jsonl") for rank in (0, 1)]
    faults = Counter(fault["in_"] for fault in noted(tmp_path / "fault-1.jsonl"))
    assert faults["profile"] > 10 and min(faults["confidence"], faults["clock"]) > 300
    assert len(steps[0]) == len(steps[1]) > 300
    different = [(mine, theirs) for mine, theirs in zip(*steps, strict=True) if mine != theirs]
    assert not different, f"{len(different)} of {len(steps[0])} steps differ, first: {different[0]}"
    trimmed = [step for step in steps[0] if step["draft"] and not step["uniform"]]
    assert len(trimmed) > 100, Counter((step["draft"], step["uniform"]) for step in steps[0])
    assert len({tuple(step["verify_lens"]) for step in trimmed}) > 20
