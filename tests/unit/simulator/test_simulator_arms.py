"""Nobody in the simulator knows more than it should, and ours is the server's engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_cases import POOL, TABLE, K, Spy

from sglang_adaptive.benchmarks.simulator.arms import Ours, maker, top_budget
from sglang_adaptive.benchmarks.simulator.loop import LAG, TRIM_MS, Scenario, simulate
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.policy.allocation import allocate_reference
from sglang_adaptive.policy.survival import survival


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6), st.integers(0, 30), st.randoms(use_true_random=False))
def test_budgets_are_handed_out_as_the_server_does(requests, budget, random):
    # Halves and quarters multiply exactly in float32: ties are ties.
    confidence = np.array(
        [[random.choice([0.0, 0.25, 0.5, 1.0]) for _ in range(4)] for _ in range(requests)], np.float32
    )
    wanted = allocate_reference(confidence, budget) - 1
    assert top_budget(survival(confidence), budget).tolist() == wanted.tolist()


def test_a_step_is_sized_with_what_was_known_two_steps_ago_about_the_same_request():
    spy = Spy()
    simulate(lambda: spy, TABLE, POOL, Scenario(6, 6000), 0)
    renewed = 0
    for n, (slots, owners, stale, known, _) in enumerate(spy.views):
        if n < LAG:
            assert not known.any()
            continue
        before_slots, before_owners, _, _, live = spy.views[n - LAG]
        for place, (slot, owner) in enumerate(zip(slots, owners, strict=True)):
            then = np.flatnonzero((before_slots == slot) & (before_owners == owner))
            assert bool(known[place]) == bool(then.size)
            renewed += not then.size
            if then.size:
                np.testing.assert_array_equal(stale[place], live[then[0]])
    assert renewed > 10, "requests finished, and their slots were used again"
    # A record arrives when the step after the next is about to be decided.
    assert all(decided == n + LAG for n, (decided, _) in enumerate(spy.records))


def test_clocks_wobble_but_time_does_not():
    spy = Spy()
    outcome = simulate(lambda: spy, TABLE, POOL, Scenario(2, 3000), 0)
    seen = np.array([record.step_ms for _, record in spy.records[1:]])
    true = TABLE.point_ms(2, 4, 4, 0.0) + TRIM_MS
    assert outcome.ms == pytest.approx(outcome.steps * true)
    assert np.median(seen) == pytest.approx(true, rel=0.01) and seen.std() > 0 and seen.max() > 4 * true


def test_ours_is_the_servers_engine_with_the_settings_given():
    arm = maker("ours:objective=rate,trust_new=true,skip.patience=3", K, TABLE, TABLE, 0.0)()
    assert isinstance(arm, Ours)
    config = arm.engine.config
    assert (config.objective, config.trust_new, config.skip.patience) == ("rate", True, 3)


@pytest.mark.parametrize(
    "name", ["ours:skip=1", "ours:nothing=1", "ours:min_gain=x", "ours:min_gain=2", "ours:calibrate"]
)
def test_impossible_settings_are_refused(name):
    with pytest.raises(AdaptiveError):
        maker(name, K, TABLE, TABLE, 0.0)


@pytest.mark.parametrize("name", ["fixed-0", "fixed-8", "fixed-x", "theirs", ""])
def test_unknown_arms_are_refused(name):
    with pytest.raises(AdaptiveError, match="There is no arm"):
        maker(name, K, TABLE, TABLE, 0.0)
