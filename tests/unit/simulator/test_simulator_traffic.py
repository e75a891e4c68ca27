"""Made-up requests and replayed ones: a position has one fate, and the head knows what it is said to know."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulator_cases import POOL, STEEP, K, run

from sglang_adaptive.benchmarks.simulator import replay, traffic
from sglang_adaptive.benchmarks.simulator.loop import Scenario
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.runtime.relay import StepRecord
from sglang_adaptive.runtime.trace import TraceRecorder, read_trace


def test_a_position_has_one_fate_whatever_step_drafts_it():
    flat = traffic.generate(replace(traffic.named("mixed"), depth=0.0), K, 1, requests=16)
    passes = flat.run > 0
    for start, length in zip(flat.start, flat.length, strict=True):
        for at in range(start, start + length):
            ahead = passes[at : at + K]
            assert flat.run[at] == (K if ahead.all() else int(np.argmin(ahead)))


def test_the_head_is_as_good_as_it_is_said_to_be():
    pool = traffic.generate(replace(traffic.named("mixed"), head_noise=0.0), K, 1, requests=256)
    first = pool.run > 0
    assert pool.truth[:, 0].mean() == pytest.approx(first.mean(), abs=0.01)
    np.testing.assert_allclose(pool.clean, pool.truth, atol=1e-6)
    sure = traffic.generate(traffic.wrong_head(traffic.named("mixed"), 1.3), K, 1, requests=64)
    assert (sure.confidence >= POOL.confidence - 1e-6).all() and (sure.clean == POOL.clean).all()
    assert (sure.run == POOL.run).all()


def test_there_is_no_such_traffic():
    with pytest.raises(AdaptiveError, match="no traffic 'heavy'"):
        traffic.named("heavy")


def recorded(tmp_path, steps):
    """A trace of one request: (confidences [K], verified, accepted) per step."""
    recorder = TraceRecorder(tmp_path / "trace", K)
    for n, (confidence, verified, accepted) in enumerate(steps):
        raw = np.full((1, K), confidence, np.float32)
        lens = np.array([verified + 1]), np.array([accepted + 1])
        recorder.record(StepRecord(n, np.array([3]), np.array([9]), 100.0, raw, *lens, 1.0), None)
    recorder.close()
    return read_trace(tmp_path / "trace")


def test_a_replayed_request_passes_where_the_recorded_one_did(tmp_path):
    trace = recorded(tmp_path, [(0.9, K, 4), (0.5, K, 0), (0.7, K, 2)] * 5)
    pool = replay.from_trace(trace, 0)
    # 4 passed and one replaced, one replaced, 2 passed and one replaced.
    fates = np.array([1, 1, 1, 1, 0, 0, 1, 1, 0] * 5, bool)
    assert pool.length.tolist() == [len(fates) - K]
    assert ((pool.run > 0) == fates).all()
    assert pool.run[:9].tolist() == [4, 3, 2, 1, 0, 0, 2, 1, 0]
    np.testing.assert_allclose(pool.confidence[0], 0.9, rtol=2e-3)
    np.testing.assert_allclose(pool.confidence[4], [0.9] * 3 + [0.5] * 4, rtol=2e-3)


def test_what_was_trimmed_is_drawn_with_its_confidence(tmp_path):
    trace = recorded(tmp_path, [(0.97, 1, 1)] * 400)
    pool = replay.from_trace(trace, 0)
    assert 0.9 < (pool.run > 0).mean() < 1.0


def test_a_replayed_trace_runs_through_the_engine(tmp_path):
    pool = replay.from_trace(recorded(tmp_path, [(0.9, K, 4), (0.5, K, 0), (0.7, K, 2)] * 20), 0)
    outcome = run("ours", Scenario(2, 2000), STEEP, pool)
    assert outcome.tokens >= 2000 and outcome.ragged > 0


def test_a_trace_with_too_little_in_it_is_refused(tmp_path):
    with pytest.raises(AdaptiveError, match="record a longer one"):
        replay.from_trace(recorded(tmp_path, [(0.5, K, 1)]), 0)
