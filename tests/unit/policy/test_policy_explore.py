"""Exploration of tiers: it corrects a table that is wrong about what it never sees, at a bounded price."""

import numpy as np
import pytest
from policy_cases import staircase

from sglang_adaptive.policy.config import PolicyConfig
from sglang_adaptive.policy.engine import Engine
from sglang_adaptive.policy.explore import BURST_STEPS, EXPLORE_TIER, TierExplorer

K = 7
TIERS = [8, 16, 24, 32, 48, 64]
STEEP = [5.0, 6.5, 7.5, 10.0, 14.0, 18.0]


def serve(engine, truth, confidence, steps, requests=8):
    """Decisions of ``steps`` steps in a world that costs what ``truth`` says."""
    decisions = []
    raw = np.full((requests, K), confidence)
    for _ in range(steps):
        decision = engine.size(
            raw, requests=requests, non_draft_tokens=requests, kv_tokens=0.0, fresh=np.ones(requests, bool)
        )
        tokens = requests + decision.budget
        engine.observe(
            requests=requests,
            non_draft_tokens=requests,
            draft_tokens=decision.budget,
            kv_tokens=0.0,
            committed_tokens=round(decision.expected_tokens),
            step_ms=truth.point_ms(requests, tokens, tokens, 0.0, decision.draft),
            drafted=decision.draft,
        )
        decisions.append(decision)
    return decisions


@pytest.mark.parametrize("believed", [[7.5, 8.0, 8.3, 8.6, 8.8, 9.0], [4.5, 7.5, 11.0, 16.0, 24.0, 32.0]])
def test_a_table_that_is_wrong_about_unused_tiers_is_found_out(believed):
    truth, told = staircase(TIERS, STEEP), staircase(TIERS, believed)
    options = {"calibrate": False, "skip_draft": False}
    best = serve(Engine(PolicyConfig(**options), truth, K), truth, 0.6, 1)[0].budget
    blind = serve(Engine(PolicyConfig(**options, explore_steps=0), told, K), truth, 0.6, 3000)
    seeing = serve(Engine(PolicyConfig(**options), told, K), truth, 0.6, 3000)
    assert blind[-1].budget != best
    late = [decision.budget for decision in seeing[1500:] if decision.reason != EXPLORE_TIER]
    assert np.mean(np.array(late) == best) > 0.98


def test_what_is_known_is_left_alone():
    truth = staircase(TIERS, STEEP)
    engine = Engine(PolicyConfig(calibrate=False, skip_draft=False, forget_steps=10**6), truth, K)
    decisions = serve(engine, truth, 0.6, 4000)
    assert not [decision for decision in decisions[2000:] if decision.reason == EXPLORE_TIER]


def test_without_a_correction_nothing_is_tried():
    truth = staircase(TIERS, STEEP)
    engine = Engine(PolicyConfig(calibrate=False, skip_draft=False, correct_costs=False), truth, K)
    assert not [d for d in serve(engine, truth, 0.6, 600) if d.reason == EXPLORE_TIER]


def tried(explorer, steps, worth=lambda tokens: 1.0, tokens=32, least=8, most=64):
    return [explorer.tokens(tokens, least, most, worth) for _ in range(steps)]


def test_a_burst_is_long_enough_to_be_believed_and_bursts_become_rare():
    explorer = TierExplorer(np.array(TIERS), 512, 4096)
    seen = np.array(tried(explorer, 31 + BURST_STEPS))
    assert (seen[:31] == 32).all() and (seen[31:] == 16).all()
    assert set(tried(explorer, 63)) == {32}
    assert set(tried(explorer, BURST_STEPS)) == {48}


def test_a_tier_that_looks_much_worse_is_not_tried():
    explorer = TierExplorer(np.array(TIERS), 512, 4096)
    assert set(tried(explorer, 3000, worth=lambda tokens: 0.7)) == {32}
    nearer = tried(explorer, 3000, worth=lambda tokens: 0.9 if tokens == 24 else 0.7)
    assert set(nearer) == {24, 32}


def test_early_bursts_are_cheap_ones():
    explorer = TierExplorer(np.array(TIERS), 512, 4096)
    seen = np.array(tried(explorer, 600, worth=lambda tokens: 0.9))
    first = int(np.flatnonzero(seen != 32)[0])
    assert first >= 32 + 64 + 100, "a burst that costs a tenth of 10 steps came before 100 steps could pay for it"


def test_a_forgotten_tier_is_tried_again():
    explorer = TierExplorer(np.array(TIERS), 64, 500)
    seen = np.array(tried(explorer, 4000))
    assert np.count_nonzero(seen[:2000] != 32) > 0 and np.count_nonzero(seen[2000:] != 32) > 0


def test_the_batch_may_shrink_during_a_burst():
    explorer = TierExplorer(np.array(TIERS), 512, 4096)
    tried(explorer, 33)
    assert set(tried(explorer, 5, tokens=8, least=2, most=12)) == {8}


def test_tokens_beyond_the_table_and_a_single_tier():
    for tiers in (TIERS, [64]):
        explorer = TierExplorer(np.array(tiers), 64, 4096)
        assert all(8 <= tokens <= 900 for tokens in tried(explorer, 500, tokens=700, least=300, most=900))
