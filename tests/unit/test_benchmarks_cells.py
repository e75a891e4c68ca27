"""What a sweep sends: the warm-up of each server, then windows of a closed loop or whole batches."""

from __future__ import annotations

from typing import Any

import pytest
from test_benchmarks_sweep import ARMS, run, written

from sglang_adaptive.benchmarks import sweep
from sglang_adaptive.benchmarks.load import Load
from sglang_adaptive.benchmarks.plan import Rows


@pytest.fixture
def loads(monkeypatch) -> list[Load]:
    """The loads of a sweep in their order."""
    sent, measure = [], sweep.measure

    async def watched(url: str, load: Load) -> dict[str, Any]:
        sent.append(load)
        return await measure(url, load)

    monkeypatch.setattr(sweep, "measure", watched)
    return sent


@pytest.mark.parametrize(("asked", "warmed"), [([], [1, 3]), ([3, 1, 2], [3, 1, 2])])
def test_servers_are_warmed_up_at_the_ends_or_where_the_sweep_says(tmp_path, loads, asked, warmed):
    assert run(written(tmp_path, ARMS[:1], repeats=1, warmup_concurrency=asked), tmp_path / "out") == 0
    assert [load.concurrency for load in loads] == [*warmed, 1, 3]


def test_an_arm_may_be_warmed_up_for_longer_than_others(tmp_path, loads):
    arms = [ARMS[0], {**ARMS[1], "warmup_seconds": 0.4}]
    changes = {"repeats": 1, "concurrency": [2], "resident": 2, "warmup_concurrency": [2]}
    assert run(written(tmp_path, arms, **changes), tmp_path / "out") == 0
    assert [load.seconds for load in loads] == [0.05, 0.2, 0.4, 0.4]


def test_a_batch_starts_together_and_ends_when_its_first_request_does(tmp_path, loads):
    changes = {"repeats": 1, "batches": True, "output_tokens": [60, 60]}
    assert run(written(tmp_path, ARMS[:1], **changes), tmp_path / "out") == 0
    assert [(load.seconds, load.requests) for load in loads] == [(0.05, None), (0.05, None), (None, 1), (None, 3)]
    rows = [row for row in Rows(tmp_path / "out" / "results.jsonl").read() if row["kind"] == "cell"]
    assert [row["completed"] for row in rows] == [1, 3]
    assert all(row["errors"] == 0 and row["tok_s"] > 0 for row in rows)
