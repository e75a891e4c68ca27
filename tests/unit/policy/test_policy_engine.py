"""What the engine makes of a step's confidences, of new requests, of limits, and of what it has learned."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import observe, size, staircase, staircases, survivals

from sglang_adaptive.policy import budget as reasons
from sglang_adaptive.policy import engine as engine_module
from sglang_adaptive.policy.budget import no_trim_can_gain, size_budget
from sglang_adaptive.policy.config import PolicyConfig
from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.policy.engine import Engine
from sglang_adaptive.policy.rate import RunningRate

K = 3
PLAIN = {"calibrate": False, "correct_costs": False, "skip_draft": False, "explore_steps": 0}


def test_new_requests_are_trusted_and_their_row_is_not_read():
    engine = Engine(PolicyConfig(**PLAIN, trust_new=True), staircase([2, 4, 8], [1.0, 1.5, 4.0]), K)
    stale = [[0.1, 0.1, 0.1], [np.nan, np.nan, np.nan]]
    assert size(engine, stale, fresh=[True, False]).budget == 2
    assert size(engine, [[0.1] * 3, [0.0] * 3], fresh=[True, False]).expected_tokens == 4.0
    assert engine.invalid_requests == 0, "the row of a new request is not looked at"
    size(engine, stale)
    assert engine.invalid_requests == 1


def test_new_requests_are_taken_as_typical():
    cost = staircase([2, 3, 4, 8], [1.0, 1.5, 2.0, 4.0])
    engine = Engine(PolicyConfig(**PLAIN), cost, K)
    unknown = np.zeros((2, K))
    assert size(engine, unknown, fresh=[False, False]).expected_tokens == 2.0, "nothing is typical yet: 3 of 4 pass"
    observe(engine, 2, 0, 2, confidence=np.array([[0.5, 0.5, 0.5], [0.25, 1.0, 1.0]]))
    assert engine.profile.mean.tolist() == [0.375, 0.25, 0.1875]
    decision = size(engine, unknown, fresh=[False, False])
    assert (decision.budget, decision.expected_tokens) == (0, 2.0)


def test_no_table_verifies_everything():
    decision = size(Engine(PolicyConfig(), CostModel.empty(), K), np.zeros((2, K)))
    assert (decision.budget, decision.uniform, decision.draft) == (6, True, True)


def test_no_requests():
    decision = size(Engine(PolicyConfig(), staircase([2, 4], [1.0, 2.0]), K), np.zeros((0, K)))
    assert decision.budget == 0 and decision.uniform


def test_low_load_verifies_everything_without_a_scan(monkeypatch):
    monkeypatch.setattr(engine_module, "size_budget", lambda *_, **__: pytest.fail("scanned"))
    engine = Engine(PolicyConfig(min_gain=0.01, **PLAIN), staircase([1, 4, 8], [10.0, 10.09, 20.0]), K)
    decision = size(engine, [[0.0, 0.0, 0.0]])
    assert decision.uniform and decision.reason == reasons.LOW_LOAD and decision.predicted_ms == 10.09


@settings(max_examples=1000, deadline=None)
@given(survivals(), staircases(), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.sampled_from([None, 0.25, 1.0]))
def test_low_load_is_never_claimed_where_the_scan_would_trim(alive, model, gain, rate):
    requests = alive.shape[0]
    if no_trim_can_gain(model, requests, alive.size, requests, 0.0, gain):
        decision = size_budget(alive, model, requests, 0.0, min_gain=gain, rate_tokens_per_ms=rate)
        # A gain of just what is needed may be rounded to a little more.
        assert decision.budget == alive.size or decision.gain <= gain + 1e-12


def test_length_limits_hold_at_low_load_too():
    engine = Engine(PolicyConfig(max_len=3, **PLAIN), staircase([1, 4, 8], [10.0, 10.0, 20.0]), K)
    decision = size(engine, [[0.9, 0.9, 0.9]])
    assert decision.budget == 2 and not decision.uniform


def test_equal_inputs_equal_decisions():
    def run():
        random = np.random.default_rng(3)
        engine = Engine(PolicyConfig(refresh_steps=8), staircase([4, 8, 16, 32], [5.0, 6.0, 9.0, 15.0]), K)
        decisions = []
        for _ in range(300):
            requests = int(random.integers(1, 8))
            confidence = random.random((requests, K))
            decisions.append(size(engine, confidence, kv=float(random.integers(0, 9999))))
            verified = random.integers(0, K + 1, requests)
            observe(
                engine,
                requests,
                int(verified.sum()),
                requests,
                float(random.uniform(5, 20)),
                confidence=confidence,
                verified=verified,
                accepted=random.integers(0, verified + 1),
            )
        return decisions

    assert run() == run()


def test_a_long_trimmed_stretch_is_broken_by_one_look_at_everything():
    config = PolicyConfig(**{**PLAIN, "explore_steps": 10, "min_gain": 0.0})
    engine = Engine(config, staircase([2, 16], [1.0, 1.12]), K)
    budgets = [size(engine, np.full((2, K), 0.1)).budget for _ in range(33)]
    assert budgets == ([0] * 10 + [6]) * 3


def test_a_look_waits_until_it_costs_no_more_than_a_share_of_the_steps():
    config = PolicyConfig(**{**PLAIN, "explore_steps": 10, "min_gain": 0.0})
    engine = Engine(config, staircase([2, 16], [1.0, 1.3]), K)
    # It takes 1.3 times as long as a trimmed step and yields 1.111 times as much: 0.189 steps at 0.002 per step.
    budgets = [size(engine, np.full((2, K), 0.1)).budget for _ in range(200)]
    assert [n for n, budget in enumerate(budgets, 1) if budget] == [95, 190]


def test_the_learned_rate_takes_over_once_it_is_known():
    config = PolicyConfig(**PLAIN, objective="rate", refresh_steps=1, min_gain=0.0)
    engine = Engine(config, staircase([1, 2, 4], [1.0, 1.5, 3.0]), K)
    hopeful = [[0.6, 0.6, 0.6]]  # ratio: 1.0, 1.07, then 1.96 / 3 and 2.18 / 3
    assert size(engine, hopeful).budget == 1
    for _ in range(40):
        observe(engine, 1, 1, 4, ms=1.6)  # 2.5 tokens per ms: half a ms is worth more than 0.6 tokens
    assert size(engine, hopeful).budget == 0


def test_the_rate_forgets_and_keeps_loads_apart():
    rate = RunningRate()
    for _ in range(3000):
        rate.observe(1, 2, 4.0, 4.0)
        rate.observe(64, 100, 10.0, 10.0)
    assert rate.rates()[0] == pytest.approx(0.5) and rate.rates()[6] == pytest.approx(10.0)
    assert rate.rates()[3] == 0.0
    rate.observe(1, 2, 1e9, 4.0)
    assert rate.rates()[0] == pytest.approx(0.5, rel=0.02)
    for bad in (float("nan"), float("inf"), 0.0, -1.0):
        rate.observe(1, 2, bad, 4.0)
    assert rate.rates()[0] == pytest.approx(0.5, rel=0.02)


def test_calibration_reaches_the_decision_and_a_restart():
    cost = staircase([1, 2, 3, 4], [10.0, 12.0, 14.0, 16.0])
    engine = Engine(PolicyConfig(skip_draft=False), cost, K)
    confidence = np.tile([0.9, 0.9, 0.9], (8, 1))
    assert size(engine, confidence[:1]).uniform
    for _ in range(64):
        # Only one first draft in ten passes, whatever the head says.
        accepted = np.array([1, 0, 0, 0, 0, 0, 0, 0])
        observe(engine, 8, 8, 9, confidence=confidence, verified=np.ones(8, np.int64), accepted=accepted)
    assert size(engine, confidence[:1]).budget == 0
    again = Engine(PolicyConfig(skip_draft=False), cost, K)
    again.load_dict(engine.to_dict())
    assert size(again, confidence[:1]).budget == 0
    for wrong in ({}, {"gamma": 2}, {"gamma": K}, None):
        with pytest.raises(ValueError, match="learned again"):
            again.load_dict(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"objective": "speed"},
        {"min_gain": -0.1},
        {"min_gain": float("nan")},
        {"trim_ms": -1.0},
        {"min_len": 0},
        {"min_len": 3, "max_len": 2},
        {"explore_steps": -1},
        {"refresh_steps": 0},
        {"forget_steps": 0},
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(wrong):
    name = list(wrong)[-1]
    with pytest.raises(ValueError, match=f"{name} is .*allowed are"):
        PolicyConfig(**wrong)
