"""When drafting stops, when it is probed, and when it comes back."""

from itertools import pairwise

import numpy as np
import pytest
from policy_cases import observe, size, staircase, stairs_cost

from sglang_adaptive.policy.budget import Decision, size_budget, verify_all
from sglang_adaptive.policy.config import PolicyConfig
from sglang_adaptive.policy.engine import Engine
from sglang_adaptive.policy.saturation import PROBE, SATURATED, SkipRules

K = 3
# Saturation: 64 requests, a drafter of 4 ms, and a verify pass that costs 0.2 ms per token.
TIERS = list(range(8, 264, 8))
SATURATING = staircase(TIERS, [10 + 0.2 * t for t in TIERS], draft=[(1, 4.0), (64, 4.0)])
RULES = SkipRules(stop_margin=0.02, return_margin=0.02, patience=4, probe_steps=3, first_interval=10, last_interval=40)
SKIPPING = {"calibrate": False, "correct_costs": False, "explore_steps": 0, "skip": RULES}


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
