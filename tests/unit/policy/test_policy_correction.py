import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import staircase

from sglang_adaptive.policy.correction import MIN_SAMPLES, WINDOW, CostCorrection, _non_decreasing, corrected
from sglang_adaptive.policy.engine import Engine, PolicyConfig

TIERS = [8, 16, 32, 64]
TABLE = [10.0, 11.0, 13.0, 17.0]


def model(**options):
    return staircase(TIERS, TABLE, **options)


def feed(correction, tokens, ms, times=MIN_SAMPLES, kv=0.0):
    for _ in range(times):
        correction.observe(1, tokens, 0, kv, False, ms)


def cost(table, tokens, kv=0.0):
    return table.point_ms(1, tokens, 1, kv, draft=False)


def test_too_few_samples_change_nothing():
    correction = CostCorrection(model())
    feed(correction, 64, 30.0, MIN_SAMPLES - 1)
    assert correction.state().tolist() == CostCorrection.neutral(model()).tolist()
    feed(correction, 64, 30.0, 1)
    assert correction.state().tolist() != CostCorrection.neutral(model()).tolist()


def test_measured_tiers_take_their_own_time_and_the_others_their_neighbours_error():
    correction = CostCorrection(model())
    feed(correction, 16, 11.0 * 1.2)
    feed(correction, 64, 17.0 * 1.5)
    table = corrected(model(), correction.state())
    assert cost(table, 16) == pytest.approx(13.2) and cost(table, 64) == pytest.approx(25.5)
    assert cost(table, 8) == pytest.approx(12.0)
    assert 13.0 * 1.2 < cost(table, 32) < 13.0 * 1.5


def test_what_is_not_verification_is_left_alone():
    base = model(draft=[(1, 2.0)], overhead_ms=3.0)
    correction = CostCorrection(base)
    for _ in range(MIN_SAMPLES):
        correction.observe(1, 64, 0, 0.0, True, 17.0 * 2 + 5.0)
    table = corrected(base, correction.state())
    assert table.point_ms(1, 64, 1, 0.0) == pytest.approx(39.0)
    assert table.draft_cost(1) == 2.0 and table.overhead_ms == 3.0


@pytest.mark.parametrize("wild", [1e6, 1e-3, float("nan"), float("inf"), -1.0, 0.0])
def test_one_wild_step_does_not_move_the_table(wild):
    correction = CostCorrection(model())
    random = np.random.default_rng(0)
    for tier, ms in zip(TIERS, TABLE, strict=True):
        for _ in range(MIN_SAMPLES):
            correction.observe(1, tier, 0, 0.0, False, ms * random.normal(1, 0.01))
    before = corrected(model(), correction.state())
    for tier in TIERS:
        correction.observe(1, tier, 0, 0.0, False, wild)
    after = corrected(model(), correction.state())
    assert after.verify_ms == pytest.approx(before.verify_ms, rel=0.02)


def test_a_real_change_is_followed_within_a_window():
    correction = CostCorrection(model())
    feed(correction, 64, 17.0, WINDOW)
    feed(correction, 64, 25.0, WINDOW // 2 + 1)
    assert cost(corrected(model(), correction.state()), 64) == pytest.approx(25.0)


def test_corrections_are_clamped():
    correction = CostCorrection(model())
    feed(correction, 64, 1e5)
    assert cost(corrected(model(), correction.state()), 64) == pytest.approx(17.0 * 4)
    correction = CostCorrection(model())
    feed(correction, 64, 1e-5)
    assert cost(corrected(model(), correction.state()), 64) == pytest.approx(17.0 / 4)


def test_a_slow_tier_that_is_not_seen_any_more_is_forgiven():
    correction = CostCorrection(model(), forget_steps=100)
    feed(correction, 16, 11.0)
    feed(correction, 64, 34.0)
    feed(correction, 16, 11.0, 100)
    assert cost(corrected(model(), correction.state()), 64) == pytest.approx(34.0)
    feed(correction, 16, 11.0, 1)
    assert cost(corrected(model(), correction.state()), 64) == pytest.approx(17.0)
    # Tried again and still slow: believed again after the same number of samples.
    feed(correction, 64, 34.0)
    assert cost(corrected(model(), correction.state()), 64) == pytest.approx(34.0)


def test_context_that_the_profile_did_not_see_is_learned():
    """The profile knew one context; in truth a thousand cached tokens cost 0.5 ms."""
    base, random = model(), np.random.default_rng(1)
    correction = CostCorrection(base)
    for _ in range(WINDOW):
        for tier, ms in zip(TIERS, TABLE, strict=True):
            kv = random.uniform(2000, 10_000)
            correction.observe(1, tier, 0, kv, False, (ms + kv * 5e-4) * random.normal(1, 0.005))
    table = corrected(base, correction.state())
    for tier, ms in zip(TIERS, TABLE, strict=True):
        for kv in (2000, 6000, 10_000, 14_000):
            assert cost(table, tier, kv) == pytest.approx(ms + kv * 5e-4, rel=0.06)


def test_without_a_spread_of_contexts_no_slope_is_invented():
    correction, random = CostCorrection(model()), np.random.default_rng(2)
    for _ in range(WINDOW):
        for tier, ms in zip(TIERS, TABLE, strict=True):
            correction.observe(1, tier, 0, 5000 * random.normal(1, 0.005), False, ms * random.normal(1, 0.05))
    assert correction.state()[0] == 0.0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(TIERS), st.floats(0.01, 1e4), st.floats(0, 1e6)), max_size=200))
def test_whatever_was_measured_the_table_stays_a_cost_table(steps):
    base = model(kv=(0.0, 1000.0))
    correction = CostCorrection(base)
    for tier, ms, kv in steps:
        correction.observe(1, tier, 0, kv, False, ms)
    table = corrected(base, correction.state())
    assert np.isfinite(table.verify_ms).all() and (table.verify_ms > 0).all()
    assert (np.diff(table.verify_ms, axis=0) >= 0).all() and (np.diff(table.verify_ms, axis=1) >= 0).all()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(-20, 20).map(float), min_size=1, max_size=12))
def test_pooling_is_the_nearest_non_decreasing_sequence(values):
    """Kuhn-Tucker conditions of the isotonic fit: blocks are means, and no block's head lies below its tail."""
    values = np.array(values)
    fit = _non_decreasing(values)
    assert (np.diff(fit) >= 0).all()
    for level in np.unique(fit):
        block = values[fit == level]
        assert block.mean() == pytest.approx(level)
        heads = np.cumsum(block) / np.arange(1, block.size + 1)
        assert (heads >= level - 1e-9).all()


def settled_engine(**options):
    """Two requests, K = 4, where it pays to trim down to the first tier: 3 of 8 drafts are good."""
    config = PolicyConfig(refresh_steps=16, skip_draft=False, explore_steps=0, calibrate=False, **options)
    return Engine(config, staircase([5, 10], [10.0, 16.0]), 4)


CONFIDENCE = np.array([[0.95, 0.9, 0.05, 0.05], [0.9, 0.1, 0.1, 0.1]])


def decide(engine):
    return engine.size(CONFIDENCE, requests=2, non_draft_tokens=2, kv_tokens=0.0, fresh=np.ones(2, bool))


def step(engine, slow=1.0):
    decision = decide(engine)
    ms = slow * decision.predicted_ms
    engine.observe(
        requests=2,
        non_draft_tokens=2,
        draft_tokens=decision.budget,
        kv_tokens=0.0,
        committed_tokens=4,
        step_ms=ms,
    )
    return decision


def test_one_slow_step_never_flips_a_decision():
    """A preempted step, a hundred times too slow, at every place of a run: every decision stays what it was."""
    for place in range(0, 80, 3):
        engine = settled_engine()
        budgets = [step(engine, 100.0 if i == place else 1.0).budget for i in range(96)]
        assert budgets == [3] * 96


def test_steps_that_stay_slow_do_flip_it():
    """The same engine is no stone: a first tier that really costs 15 ms makes the second one worth it."""
    engine = settled_engine()
    for _ in range(64):
        engine.observe(requests=2, non_draft_tokens=2, draft_tokens=3, kv_tokens=0.0, committed_tokens=4, step_ms=15.9)
        engine.observe(requests=2, non_draft_tokens=2, draft_tokens=8, kv_tokens=0.0, committed_tokens=4, step_ms=16.0)
    assert decide(engine).budget == 8


def test_ranks_with_different_clocks_agree():
    random = np.random.default_rng(4)
    ranks = [settled_engine(auto_refresh=False) for _ in range(2)]
    for i in range(200):
        decisions = [decide(rank) for rank in ranks]
        assert decisions[0] == decisions[1]
        for rank, skew in zip(ranks, (1.0, 1.6), strict=True):
            rank.observe(
                requests=2,
                non_draft_tokens=2,
                draft_tokens=decisions[0].budget if i % 2 else 8,
                kv_tokens=0.0,
                committed_tokens=4,
                step_ms=12.0 * skew * random.normal(1, 0.05),
            )
        assert ranks[0].refresh_due == ranks[1].refresh_due
        if ranks[0].refresh_due:
            state = ranks[0].measured_state()
            assert not np.array_equal(state, ranks[1].measured_state())
            for rank in ranks:
                rank.apply_measured(state)
    assert ranks[0].cost.verify_ms.tolist() == ranks[1].cost.verify_ms.tolist() != [[10.0], [16.0]]


def test_a_state_of_another_table_is_refused():
    with pytest.raises(ValueError, match="does not belong"):
        settled_engine().apply_measured(np.ones(5))


def test_switched_off_it_changes_nothing():
    engine = settled_engine(correct_costs=False)
    for _ in range(64):
        step(engine, 2.0)
    assert engine.cost.verify_ms.tolist() == [[10.0], [16.0]]
    assert dataclasses.asdict(decide(engine))["predicted_ms"] == 10.0
