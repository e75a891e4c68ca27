from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import staircase, staircases, stairs_cost, survivals

from sglang_adaptive.policy import budget as reasons
from sglang_adaptive.policy import engine as engine_module
from sglang_adaptive.policy.budget import Decision, no_trim_can_gain, size_budget, verify_all
from sglang_adaptive.policy.config import PolicyConfig
from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.policy.engine import Engine
from sglang_adaptive.policy.rate import RunningRate
from sglang_adaptive.policy.saturation import PROBE, SATURATED, SkipRules

K = 3
PLAIN = {"calibrate": False, "correct_costs": False, "skip_draft": False, "explore_steps": 0}


def size(engine, confidence, fresh=None, prefill=0, kv=0.0, **options):
    confidence = np.asarray(confidence, np.float64)
    requests = confidence.shape[0]
    fresh = np.ones(requests, bool) if fresh is None else np.array(fresh)
    return engine.size(
        confidence, requests=requests, non_draft_tokens=requests + prefill, kv_tokens=kv, fresh=fresh, **options
    )


def observe(engine, requests, budget, committed, ms=None, **options):
    engine.observe(
        requests=requests,
        non_draft_tokens=requests,
        draft_tokens=budget,
        kv_tokens=0.0,
        committed_tokens=committed,
        step_ms=ms,
        **options,
    )


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
        assert size_budget(alive, model, requests, 0.0, min_gain=gain, rate_tokens_per_ms=rate).budget == alive.size


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


# Saturation: 64 requests, a drafter of 4 ms, and a verify pass that costs 0.2 ms per token.
TIERS = list(range(8, 264, 8))
SATURATING = staircase(TIERS, [10 + 0.2 * t for t in TIERS], draft=[(1, 4.0), (64, 4.0)])
RULES = SkipRules(stop_margin=0.02, return_margin=0.02, patience=4, probe_steps=3, first_interval=10, last_interval=40)
SKIPPING = {**PLAIN, "skip_draft": True, "skip": RULES}


def saturated(confidence, steps, engine, requests=64):
    """Play steps; a step that drafts shows ``confidence`` in every request, one that does not shows stale values."""
    decisions = []
    for _ in range(steps):
        live = np.full((requests, K), confidence)
        decision = size(engine, live)
        observe(engine, requests, decision.budget, requests, drafted=decision.draft, confidence=live)
        decisions.append(decision)
    return decisions


def test_drafting_stops_at_saturation_and_probes_ever_more_rarely():
    engine = Engine(PolicyConfig(**SKIPPING), SATURATING, K)
    decisions = saturated(0.05, 120, engine)
    drafted = "".join("d" if d.draft else "." for d in decisions)
    # The first step has no profile yet. A seventh is lost, so that a bad step counts twice, and the second one after it
    # is skipped; then probes of three steps.
    assert drafted.startswith("dd.")
    gaps = [len(run) for run in drafted.strip("d").split("ddd") if run]
    assert gaps[:3] == [10, 20, 40] and max(gaps) == 40
    assert {d.reason for d in decisions if not d.draft} == {SATURATED}
    skipped = next(d for d in decisions if not d.draft)
    assert (skipped.budget, skipped.uniform, skipped.expected_tokens) == (0, False, 64.0)
    assert skipped.predicted_ms == pytest.approx(10 + 0.2 * 64)
    assert PROBE in {d.reason for d in decisions}


def test_drafting_that_pays_again_is_found_by_a_probe():
    engine = Engine(PolicyConfig(**SKIPPING), SATURATING, K)
    assert not saturated(0.05, 20, engine)[-1].draft
    back = saturated(0.95, 150, engine)
    assert all(d.draft for d in back[-20:])


def test_a_falling_load_brings_drafting_back_at_once():
    """At 4 requests the same poor drafts pay: another load starts a probe, and the profile says the rest."""
    model = staircase(TIERS, [10 + 0.2 * t for t in TIERS], draft=[(1, 0.1), (8, 0.1), (64, 9.0)])
    engine = Engine(PolicyConfig(**SKIPPING), model, K)
    assert not saturated(0.4, 30, engine)[-1].draft
    decisions = saturated(0.4, 8, engine, requests=4)
    assert all(d.draft for d in decisions)
    probes = [d.reason == PROBE for d in decisions]
    assert probes[0] and not probes[-1] and probes == sorted(probes, reverse=True)


def test_one_odd_step_never_stops_drafting():
    engine = Engine(PolicyConfig(**SKIPPING), SATURATING, K)
    assert saturated(0.9, 20, engine)[-1].draft
    for _ in range(10):
        assert saturated(0.0, 1, engine)[0].draft
        assert all(decision.draft for decision in saturated(0.9, 5, engine))


@pytest.mark.parametrize("requests", [4, 64])
def test_a_head_that_is_far_too_low_is_corrected_before_it_can_stop_drafting(requests):
    """It says 0.2 where nine drafts of ten pass, which pays well."""
    engine = Engine(PolicyConfig(), SATURATING, K)
    confidence, all_pass = np.full((requests, K), 0.2), np.full(requests, K)
    for n in range(200):
        fresh = np.full(requests, n > 1)
        step = {"requests": requests, "non_draft_tokens": requests, "kv_tokens": 0.0}
        decision = engine.size(confidence, fresh=fresh, **step)
        assert decision.draft, f"step {n}: {decision}"
        verified = np.full(requests, -(-decision.budget // requests))
        accepted = np.minimum(verified, all_pass - (np.arange(requests) + n) % 10 // 9 * K)
        engine.observe(
            **step,
            draft_tokens=decision.budget,
            committed_tokens=requests + int(accepted.sum()),
            confidence=confidence,
            verified=verified,
            accepted=accepted,
        )


def test_a_probe_does_not_verify_everything_where_the_table_rules_that_out():
    """Nothing was measured, and by the table a trimmed step yields a multiple of the tokens per ms."""
    engine = Engine(PolicyConfig(), SATURATING, K)
    engine.gate.skipping = True
    alive = np.tile(0.01 ** np.arange(1, K + 1), (32, 1))
    whole = verify_all(alive, engine.cost, 32, 0.0, "whole")
    much_better = Decision(8, True, False, 32.2, whole.predicted_ms / 1.3, "trimmed")
    assert engine.modes.trimmed_or_whole(much_better, alive, engine.cost, 32, 0.0, elapsed=1) is much_better
    little_better = much_better.at_cost(whole.predicted_ms / 1.1)
    assert engine.modes.trimmed_or_whole(little_better, alive, engine.cost, 32, 0.0, elapsed=1).uniform


def test_repeated_steps_count_for_the_next_probe():
    """One step in eight is sized: probes come after as many steps as if all were, give or take seven."""
    waits = []
    for repeated in (0, 7):
        engine = Engine(PolicyConfig(**SKIPPING), SATURATING, K)
        saturated(0.0, 20, engine)
        assert engine.gate.skipping
        probes, step = [], 0
        confidence, fresh = np.zeros((64, K)), np.ones(64, bool)
        while step < 400:
            step += 1 + repeated
            sized = {"requests": 64, "non_draft_tokens": 64, "kv_tokens": 0.0}
            decision = engine.size(confidence, fresh=fresh, repeated=repeated, **sized)
            probes += [step] if decision.reason == PROBE else []
        waits.append(max(later - sooner for sooner, later in pairwise(probes)))
    assert 40 <= waits[0] <= waits[1] <= waits[0] + 8


def test_one_request_is_judged_by_many_steps():
    """Its drafts pay on average, though in half of the steps they do not."""
    model = staircase([1, 2, 3, 4], [10.0, 10.1, 10.2, 10.3], draft=[(1, 2.0)])
    engine = Engine(PolicyConfig(**SKIPPING), model, K)
    decisions = [saturated(0.1 if n // 4 % 2 else 0.8, 1, engine, requests=1)[0] for n in range(400)]
    assert all(decision.draft for decision in decisions)


def test_near_the_break_even_it_does_not_flap():
    """Confidence wobbles around the point where drafting neither gains nor loses: no change of sides."""
    engine, random = Engine(PolicyConfig(**SKIPPING), SATURATING, K), np.random.default_rng(5)
    even = break_even(engine)
    sides = [saturated(even + random.normal(0, 0.002), 1, engine)[0].draft for _ in range(300)]
    assert sum(a != b for a, b in pairwise(sides)) <= 1


def break_even(engine):
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        alive = middle ** np.arange(1, K + 1) * np.ones((64, 1))
        best = size_budget(alive, engine.cost, 64, 0.0)
        pays = best.expected_tokens / best.predicted_ms > 64 / engine.cost.point_ms(64, 64, 64, 0.0, draft=False)
        low, high = (low, middle) if pays else (middle, high)
    return high


def test_never_much_below_no_speculation_and_no_cliff():
    """Long-run rate over the confidence, in a world that is as the table says: at least 0.98 of the better of
    drafting and not drafting everywhere, and it rises without a jump."""
    rates = []
    for confidence in np.linspace(0.05, 0.95, 19):
        engine = Engine(PolicyConfig(**{**SKIPPING, "skip": SkipRules()}), SATURATING, K)
        decisions = saturated(confidence, 1500, engine)
        tokens = ms = 0.0
        alive = confidence ** np.arange(1, K + 1) * np.ones((64, 1))
        for d in decisions:
            falling = np.sort(alive.ravel())[::-1]
            tokens += 64 + falling[: d.budget].sum()
            ms += stairs_cost(SATURATING, 64 + d.budget) + (4.0 if d.draft else 0.0)
        best = size_budget(alive, SATURATING, 64, 0.0)
        drafting = best.expected_tokens / best.predicted_ms
        plain = 64 / SATURATING.point_ms(64, 64, 64, 0.0, draft=False)
        assert tokens / ms > 0.98 * max(drafting, plain)
        rates.append(tokens / ms)
    assert (np.diff(rates) > -0.02 * np.array(rates[1:])).all()


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
