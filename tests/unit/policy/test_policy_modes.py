"""A server finds out by measuring what its profile cannot see: the host's work around a draft."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from sglang_adaptive.policy.budget import NO_TABLE, Decision
from sglang_adaptive.policy.config import PolicyConfig
from sglang_adaptive.policy.cost import CostModel, VerifySample
from sglang_adaptive.policy.engine import Engine
from sglang_adaptive.policy.mode_choice import LOOK, LOOK_WHOLE
from sglang_adaptive.policy.modes import (
    LOOK_STEPS,
    MIN_SAMPLES,
    NARROW_TRIMMED,
    NARROW_WHOLE,
    PLAIN,
    TRIMMED,
    WHOLE,
    Look,
    ModeTimes,
    factors,
    mode_of,
)
from sglang_adaptive.policy.rate import BUCKETS
from sglang_adaptive.policy.steady import WHOLE_IS_FASTER

GAMMA = 7


def profiled() -> CostModel:
    """As an H200 profiles a model of 135M: a verification is nearly flat, a draft takes half of one."""
    verify = [VerifySample(tokens, 512, 2.4 + 0.001 * tokens) for tokens in (8, 64, 256, 2048)]
    return CostModel.from_samples(verify, [(1, 1.2), (256, 1.6)], [(1, 0.05), (2048, 0.1)], capture_limit=2048)


def serve(requests: int, draft_ms: float, plain_ms: float, chance: float, steps: int = 3000):
    """Rate of the last two thirds over the rate of never drafting and of always drafting, and the engine."""
    rng = np.random.default_rng(5)
    engine = Engine(PolicyConfig(), profiled(), GAMMA)
    confidence = np.full((requests, GAMMA), chance)
    tokens = ms = 0.0
    looks = 0
    for step in range(steps):
        fresh = np.full(requests, step > 1)
        decision = engine.size(confidence, requests=requests, non_draft_tokens=requests, kv_tokens=512.0, fresh=fresh)
        looks += decision.reason == LOOK
        verified = np.full(requests, decision.budget // requests)
        drawn = rng.random((requests, GAMMA)) < chance
        accepted = np.minimum(np.cumprod(drawn, axis=1).sum(axis=1), verified)
        took = (draft_ms if decision.draft else plain_ms) * rng.uniform(0.97, 1.03)
        engine.observe(
            requests=requests,
            non_draft_tokens=requests,
            draft_tokens=int(verified.sum()),
            kv_tokens=512.0,
            committed_tokens=int(accepted.sum()) + requests,
            step_ms=took,
            drafted=decision.draft,
            confidence=confidence if decision.draft else None,
            verified=verified,
            accepted=accepted,
        )
        if step >= steps // 3:
            tokens += accepted.sum() + requests
            ms += took
    expected = 1 + np.cumprod(np.full(GAMMA, chance)).sum()
    best = max(1 / plain_ms, expected / draft_ms) * requests
    return tokens / ms / best, engine, looks


@pytest.mark.parametrize("requests", [1, 32])
def test_hidden_host_work_makes_it_stop_drafting(requests):
    rate, engine, _ = serve(requests, draft_ms=7.6, plain_ms=2.0, chance=0.45)
    assert engine.gate.skipping
    assert rate > 0.97


@pytest.mark.parametrize("requests", [1, 32])
def test_it_goes_on_drafting_where_that_pays_and_looks_seldom(requests):
    rate, engine, looks = serve(requests, draft_ms=4.0, plain_ms=2.6, chance=0.8)
    assert not engine.gate.skipping
    assert looks <= 8 * LOOK_STEPS
    assert rate > 0.99


def test_without_measured_times_it_never_looks():
    engine = Engine(PolicyConfig(), profiled(), GAMMA)
    confidence, fresh = np.full((4, GAMMA), 0.8), np.ones(4, bool)
    for _ in range(300):
        decision = engine.size(confidence, requests=4, non_draft_tokens=4, kv_tokens=512.0, fresh=fresh)
        assert decision.reason != LOOK
        engine.observe(requests=4, non_draft_tokens=4, draft_tokens=28, kv_tokens=512.0, committed_tokens=12)


def test_a_look_comes_after_32_steps_then_after_twice_as_many_and_each_load_has_its_own():
    look = Look(longest_interval=64)
    due = [step for step in range(400) if look.due(5, 1.0)]
    starts = [step for step in due if step - 1 not in due]
    assert len(due) == len(starts) * LOOK_STEPS
    assert starts[0] == 32 and all(b - a == 64 + LOOK_STEPS for a, b in pairwise(starts))
    assert not look.due(1, 1.0)
    assert not any(Look(0).due(5, 1.0) for _ in range(200))


def test_a_look_waits_until_it_is_a_small_share_of_the_steps():
    """Drafting twice as good: 12 steps at half the output are 6 lost ones, 0.2 % of 3000."""
    look = Look(longest_interval=64)
    due = [step for step in range(7000) if look.due(5, 2.0)]
    assert len(due) == 2 * LOOK_STEPS and due[0] == 2999
    assert look.due(1, 0.5) is False and [look.due(1, 0.5) for _ in range(32)][-1]


def test_medians_are_not_moved_by_odd_times_and_unknown_is_zero():
    times = ModeTimes()
    for ms in [3.0] * MIN_SAMPLES + [900.0]:
        times.observe(4, WHOLE, ms, 2.0)
    for bad in (float("nan"), float("inf"), 0.0, -1.0):
        times.observe(4, WHOLE, bad, 2.0)
    state = times.state()
    assert factors(state.tolist(), 4) == [0.0, 1.5, 0.0, 0.0, 0.0]
    assert factors(state.tolist(), 64)[WHOLE] == 0.0 and state.size == 5 * BUCKETS
    assert [mode_of(False, False), mode_of(True, True), mode_of(True, False)] == [PLAIN, WHOLE, TRIMMED]
    assert [mode_of(True, True, 3), mode_of(True, False, 3)] == [NARROW_WHOLE, NARROW_TRIMMED]


def packed(packing_ms: float, chance: float, steps: int = 2500):
    """A server of 32 requests whose trimmed steps take ``packing_ms`` longer: reasons by step, and the rate over that
    of never trimming."""
    rng = np.random.default_rng(7)
    verify = [VerifySample(tokens, 512, 4.0 + 0.01 * tokens) for tokens in (8, 64, 128, 256, 2048)]
    cost = CostModel.from_samples(verify, [(1, 1.0), (256, 1.6)], [(1, 0.05), (2048, 0.1)], capture_limit=2048)
    engine = Engine(PolicyConfig(skip_draft=False), cost, GAMMA)
    confidence, requests = np.full((32, GAMMA), chance), 32
    reasons, tokens, ms = [], 0.0, 0.0
    for step in range(steps):
        fresh = np.full(requests, step > 1)
        decision = engine.size(confidence, requests=requests, non_draft_tokens=requests, kv_tokens=512.0, fresh=fresh)
        reasons.append(decision.reason)
        verified = np.full(requests, decision.budget // requests)
        accepted = np.minimum(np.cumprod(rng.random((requests, GAMMA)) < chance, axis=1).sum(axis=1), verified)
        drafts = int(verified.sum())
        took = cost.point_ms(requests, requests + drafts, requests + drafts, 512.0)
        took = (took + packing_ms * (not decision.uniform)) * rng.uniform(0.98, 1.02)
        engine.observe(
            requests=requests,
            non_draft_tokens=requests,
            draft_tokens=drafts,
            kv_tokens=512.0,
            committed_tokens=int(accepted.sum()) + requests,
            step_ms=took,
            confidence=confidence,
            verified=verified,
            accepted=accepted,
        )
        if step >= steps // 3:
            tokens += accepted.sum() + requests
            ms += took
    whole_ms = cost.point_ms(requests, requests * (1 + GAMMA), requests * (1 + GAMMA), 512.0)
    whole = requests * (1 + np.cumprod(np.full(GAMMA, chance)).sum()) / whole_ms
    return reasons, tokens / ms / whole


def test_trims_that_cost_more_than_they_save_are_left_out():
    reasons, rate = packed(packing_ms=2.5, chance=0.6)
    assert all(reason.startswith("verify everything") for reason in reasons[1000:])
    assert rate > 0.985


def test_trims_that_pay_go_on_and_the_other_mode_is_seldom_looked_at():
    reasons, rate = packed(packing_ms=0.0, chance=0.6)
    assert 0 < reasons.count(LOOK_WHOLE) <= 8 * LOOK_STEPS and WHOLE_IS_FASTER not in reasons
    assert rate > 1.03


def measured(engine, mode_ms, requests=32, steps=MIN_SAMPLES):
    """Let ``engine`` see steps of 32 requests: {(drafted, draft tokens): ms}."""
    for (drafted, drafts), ms in mode_ms.items():
        for _ in range(steps):
            engine.observe(
                requests=requests,
                non_draft_tokens=requests,
                draft_tokens=drafts,
                kv_tokens=512.0,
                committed_tokens=requests,
                step_ms=ms,
                drafted=drafted,
            )
    engine.apply_measured(engine.measured_state())


def test_a_server_that_stopped_drafting_probes_what_it_never_measured():
    """Trimmed steps do not pay. Whether those that verify everything do, nobody has seen yet."""
    engine = Engine(PolicyConfig(), profiled(), GAMMA)
    engine.gate.skipping = True
    engine.profile.observe(np.tile(0.5 ** np.arange(1, 8), (32, 1)), rare=False)
    alive = np.tile(0.5 ** np.arange(1, 8), (32, 1))
    measured(engine, {(False, 0): 5.3, (True, 60): 7.7})
    trimmed = Decision(60, True, False, 50.0, 4.0, "trimmed")

    def chosen() -> Decision:
        return engine.modes.trimmed_or_whole(trimmed, alive, engine.cost, 32, 512.0, elapsed=1)

    assert chosen().uniform
    measured(engine, {(True, 7 * 32): 5.3})
    assert chosen().reason == WHOLE_IS_FASTER
    measured(engine, {(True, 7 * 32): 20.0}, steps=16)
    assert chosen() is trimmed


def test_a_table_that_its_correction_made_flat_does_not_end_the_comparison_of_modes():
    """Slow steps at few tokens, as while requests join, can do that to a table."""
    engine = Engine(PolicyConfig(auto_refresh=False), profiled(), GAMMA)
    flat = profiled().verify_ms[-1, 0] / profiled().verify_ms[:, 0]
    confidence, verified, accepted = np.full((32, GAMMA), 0.45), np.full(32, GAMMA), np.zeros(32, np.int64)
    reasons = set()
    for step in range(600):
        fresh = np.full(32, step > 1)
        decision = engine.size(confidence, requests=32, non_draft_tokens=32, kv_tokens=512.0, fresh=fresh)
        reasons.add(decision.reason)
        engine.observe(
            requests=32,
            non_draft_tokens=32,
            draft_tokens=decision.budget,
            kv_tokens=512.0,
            committed_tokens=40,
            step_ms=7.6 if decision.draft else 2.0,
            drafted=decision.draft,
            confidence=confidence if decision.draft else None,
            verified=verified,
            accepted=accepted,
        )
        if engine.refresh_due:
            state = engine.measured_state()
            state[-flat.size :] = flat
            engine.apply_measured(state)
            assert not engine.cost.is_informative
    assert engine.gate.skipping and NO_TABLE not in reasons


def test_a_step_that_waited_for_the_host_says_nothing_of_the_table():
    engine = Engine(PolicyConfig(), profiled(), GAMMA)
    confidence, fresh = np.full((4, GAMMA), 0.8), np.ones(4, bool)
    for follows in (False, True):
        for _ in range(200):
            engine.size(confidence, requests=4, non_draft_tokens=4, kv_tokens=512.0, fresh=fresh)
            engine.observe(
                requests=4,
                non_draft_tokens=4,
                draft_tokens=28,
                kv_tokens=512.0,
                committed_tokens=12,
                step_ms=12.0,
                follows=follows,
            )
        moved = engine.cost.verify_cost(32, 512.0) > 2 * profiled().verify_cost(32, 512.0)
        assert moved == follows
