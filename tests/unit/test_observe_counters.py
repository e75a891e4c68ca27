"""The counters: sums that do not depend on when they are read, and the error of confidences on steps not yet seen."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sglang_adaptive.policy.budget import LOW_LOAD, NO_TABLE, TRIMMED, Decision
from sglang_adaptive.policy.calibration import Calibration
from sglang_adaptive.policy.saturation import SATURATED
from sglang_adaptive.runtime import counters as module
from sglang_adaptive.runtime.calibration_error import CalibrationError
from sglang_adaptive.runtime.counters import Counters, load_of
from sglang_adaptive.runtime.relay import StepRecord

GAMMA = 4
ALL = Decision(0, True, True, 1.0, 4.0, LOW_LOAD)
TRIM = Decision(3, True, False, 1.0, 5.0, TRIMMED)
NONE = Decision(0, False, False, 1.0, 2.0, SATURATED)


def record(rng: np.random.Generator, requests: int, decision: Decision | None, step_ms: float | None) -> StepRecord:
    drafted = decision is None or decision.draft
    verified = rng.integers(0, GAMMA + 1, requests) if drafted else np.zeros(requests, int)
    return StepRecord(
        iteration=0,
        slots=np.arange(requests),
        generations=np.zeros(requests, int),
        kv_tokens=1.0,
        confidence=rng.random((requests, GAMMA)).astype(np.float32) if drafted else None,
        verify_lens=verified + 1,
        commit_lens=rng.integers(0, verified + 1) + 1,
        step_ms=step_ms,
        decision=decision,
    )


def some_records(count: int, seed: int = 0) -> list[StepRecord]:
    rng = np.random.default_rng(seed)
    times = [None, 1.5, 7.0, 30.0]
    return [
        record(rng, int(rng.integers(1, 40)), [ALL, TRIM, NONE, None][rng.integers(4)], times[rng.integers(4)])
        for _ in range(count)
    ]


def observed(records: list[StepRecord], read_after: int = 0) -> Counters:
    counters = Counters(GAMMA)
    for number, each in enumerate(records, 1):
        counters.observe(each)
        if read_after and number % read_after == 0:
            counters.as_dict()
    return counters


def test_the_sums_are_those_of_the_steps_one_by_one():
    records = some_records(200)
    state = observed(records).as_dict()
    rows = [
        (verify - 1, commit - 1) for r in records for verify, commit in zip(r.verify_lens, r.commit_lens, strict=True)
    ]
    assert state["steps"] == 200 and state["requests"] == len(rows)
    assert state["verify_tokens"] == sum(verified + 1 for verified, _ in rows)
    assert state["committed_tokens"] == sum(accepted + 1 for _, accepted in rows)
    assert state["accepted_tokens"] == sum(accepted for _, accepted in rows)
    assert state["wasted_tokens"] == sum(verified - accepted for verified, accepted in rows)
    assert state["drafted_tokens"] == sum(GAMMA * len(r.slots) for r in records if r.confidence is not None)
    for name, column in (("verified", 0), ("accepted", 1)):
        expected = [sum(row[column] > j for row in rows) for j in range(GAMMA)]
        assert state[f"{name}_per_position"] == expected
    assert state["decisions"] == {
        "verify_all": sum(r.decision is ALL for r in records),
        "trimmed": sum(r.decision is TRIM for r in records),
        "not_drafted": sum(r.decision is NONE for r in records),
    }
    timed = [r for r in records if r.step_ms is not None and r.decision is not None]
    assert state["step_time"]["steps"] == len(timed)
    assert state["step_time"]["measured_ms"] == pytest.approx(sum(r.step_ms for r in timed))
    assert state["step_time"]["predicted_ms"] == pytest.approx(sum(r.decision.predicted_ms for r in timed))
    errors = [abs(r.step_ms - r.decision.predicted_ms) for r in timed]
    assert state["step_time"]["error_ms"] == pytest.approx(sum(errors))


def test_loads_are_powers_of_two_and_add_up():
    records = some_records(150, seed=3)
    state = observed(records).as_dict()
    for load, sums in state["by_load"].items():
        mine = [r for r in records if int(load) <= len(r.slots) < 2 * int(load)]
        timed = [r for r in mine if r.step_ms is not None]
        assert (sums["steps"], sums["requests"]) == (len(mine), sum(len(r.slots) for r in mine))
        assert sums["timed_steps"] == len(timed)
        assert sums["timed_tokens"] == sum(r.commit_lens.sum() for r in timed)
        assert sums["measured_ms"] == pytest.approx(sum(r.step_ms for r in timed))
        assert sums["request_ms"] == pytest.approx(sum(r.step_ms * len(r.slots) for r in timed))
        for name, decision in (("verify_all", ALL), ("trimmed", TRIM), ("not_drafted", NONE)):
            times = [r.step_ms for r in timed if r.decision is decision]
            assert (name in sums["by_decision"]) == bool(times)
            if times:
                assert sums["by_decision"][name]["timed_steps"] == len(times)
                assert sums["by_decision"][name]["measured_ms"] == pytest.approx(sum(times))
    for name in ("steps", "requests", "verify_tokens", "committed_tokens", "wasted_tokens"):
        assert sum(sums[name] for sums in state["by_load"].values()) == state[name]
    assert load_of(np.array([1, 2, 3, 4, 1023, 1024, 10**6])).tolist() == [0, 1, 1, 2, 9, 10, 10]


@pytest.mark.parametrize("read_after", [1, 7, 64])
def test_reading_changes_no_sum(read_after):
    records = some_records(130, seed=5)
    once, often = observed(records).as_dict(), observed(records, read_after).as_dict()
    # What is recent depends on when it is summed; everything else does not.
    assert once.pop("calibration")["error"] == pytest.approx(often.pop("calibration")["error"], abs=0.05)
    assert json.dumps(once) == json.dumps(often)


def test_a_step_alone_is_counted_when_somebody_looks_and_memory_is_bounded():
    counters = Counters(GAMMA)
    for each in some_records(module.FOLD_STEPS * 3 + 1):
        counters.observe(each)
        assert len(counters._waiting) < module.FOLD_STEPS
    assert counters.as_dict()["steps"] == module.FOLD_STEPS * 3 + 1
    assert Counters(GAMMA).as_dict()["steps"] == 0


def test_fallbacks_by_reason():
    rng = np.random.default_rng(1)
    broken = record(rng, 3, ALL, 1.0)
    broken.confidence[1, 2] = np.nan
    beyond = record(rng, 3, ALL, 1.0)
    beyond.confidence[0, 0] = 1.5
    overruled = Decision(12, True, True, 1.0, 2.0, SATURATED)
    steps = [
        broken,
        beyond,
        record(rng, 3, overruled, 1.0),
        record(rng, 2, Decision(8, True, True, 0, 0, NO_TABLE), 1.0),
    ]
    state = observed([*steps, record(rng, 2, NONE, 1.0)]).as_dict()
    assert state["fallbacks"] == {"no_cost_table": 1, "needs_draft": 1, "invalid_confidence": 2}
    assert np.isfinite(state["calibration"]["error"])
    json.dumps(state, allow_nan=False)


def outcomes(
    rng: np.random.Generator, rows: int, stated: float, true: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    confidence = np.full((rows, GAMMA), stated, np.float32)
    accepted = np.cumprod(rng.random((rows, GAMMA)) < true, axis=1).sum(axis=1)
    return confidence, np.full(rows, GAMMA), accepted


def test_the_error_of_confidences_is_their_distance_from_what_happens():
    rng = np.random.default_rng(2)
    error = CalibrationError(GAMMA)
    for _ in range(40):
        error.observe(*outcomes(rng, 500, 0.9, 0.6))
    state = error.as_dict()
    assert state["error"] == state["raw_error"] == pytest.approx(0.3, abs=0.01)
    assert state["bias_per_position"] == pytest.approx([0.3] * GAMMA, abs=0.04)


def test_the_calibrated_error_is_of_steps_not_yet_learned_from():
    rng = np.random.default_rng(3)
    calibration = Calibration(GAMMA)
    error = CalibrationError(GAMMA, calibration)
    first = None
    for _ in range(60):
        step = outcomes(rng, 64, 0.9, 0.6)
        calibration.observe(*step)
        error.observe(*step)
        first = first if first is not None else error.as_dict()["error"]
    assert first > 0.2, "the first fold was judged by what was learned from it"
    state = error.as_dict()
    assert state["raw_error"] > 0.27 and state["error"] < state["raw_error"] / 3


def test_old_errors_are_forgotten():
    rng = np.random.default_rng(4)
    error = CalibrationError(GAMMA)
    for _ in range(50):
        error.observe(*outcomes(rng, 200, 0.95, 0.5))
    for _ in range(300):
        error.observe(*outcomes(rng, 200, 0.7, 0.7))
    assert error.as_dict()["error"] < 0.03


def test_nothing_decided_is_no_error():
    error = CalibrationError(GAMMA)
    assert error.as_dict()["error"] is None
    error.observe(np.full((3, GAMMA), np.nan, np.float32), np.full(3, GAMMA), np.zeros(3, int))
    error.observe(np.full((3, GAMMA), 0.5, np.float32), np.zeros(3, int), np.zeros(3, int))
    assert error.as_dict() == {"drafts": 0.0, "error": None, "raw_error": None, "bias_per_position": [None] * GAMMA}
