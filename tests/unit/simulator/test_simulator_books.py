"""The simulator's clock and its books are right."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from simulator_cases import POOL, STEEP, TABLE, K, run

from sglang_adaptive.benchmarks.simulator import bound
from sglang_adaptive.benchmarks.simulator.arms import Fixed
from sglang_adaptive.benchmarks.simulator.loop import LAG, Scenario, drafting, simulate
from sglang_adaptive.policy.cost import CostModel, VerifySample
from sglang_adaptive.policy.engine import Engine


@pytest.mark.parametrize("c", [1, 16, 128])
def test_no_speculation_yields_one_token_per_request_and_step(c):
    outcome = run("none", Scenario(c, 500 * c))
    assert outcome.tokens == 500 * c and outcome.steps == outcome.plain == 500
    assert outcome.ms == pytest.approx(500 * TABLE.point_ms(c, c, c, 0.0, draft=False))


def test_a_fixed_length_yields_what_the_requests_accept():
    outcome = run("fixed-3", Scenario(4, 4000))
    assert outcome.drafts == 3 * outcome.rows and outcome.tokens == outcome.rows + outcome.accepted
    assert outcome.ms == pytest.approx(outcome.steps * TABLE.point_ms(4, 16, 16, 0.0))
    # One request, played by hand: the same positions, the same fates.
    seen = []

    class Watched(Fixed):
        def decide(self, view):
            seen.append((int(view.at[0]), int(view.run[0])))
            return super().decide(view)

    simulate(lambda: Watched(2), TABLE, POOL, Scenario(1, 300), 0)
    for (at, passed), (then, _) in pairwise(seen):
        assert passed == POOL.run[at]
        same_request = np.searchsorted(POOL.start, at, "right") == np.searchsorted(POOL.start, then, "right")
        assert not same_request or then == at + min(passed, 2) + 1


def test_equal_seeds_equal_outcomes():
    scenario = Scenario(8, 4000)
    assert run("ours", scenario) == run("ours", scenario)
    assert run("ours", scenario).ms != run("ours", scenario, seed=1).ms


def test_knowing_more_is_never_worse():
    scenario = Scenario(32, 32_000)
    rates = [(o := run(arm, scenario, STEEP)).tokens / o.ms for arm in ("fixed-2", "informed", "clairvoyant", "oracle")]
    assert rates == sorted(rates)


def test_one_rate_for_easy_and_hard_text_is_no_better_than_the_ratio():
    """Requests go through their text in order: a token of a hard passage is worth more time than the average one."""
    scenario = Scenario(2, 16_000)
    ratio, rate, clairvoyant = (
        (o := run(arm, scenario)).tokens / o.ms for arm in ("informed", "informed-rate", "clairvoyant")
    )
    assert 0.95 < rate / ratio < 1.01 and ratio < clairvoyant


def test_what_one_request_can_attain_is_above_all_who_do_not_know_outcomes():
    found = bound.attainable(POOL, TABLE)
    assert (
        max(rate for arm, rate in found.items() if arm != "clairvoyant") == found["attainable"] < found["clairvoyant"]
    )
    # The same steps, simulated: chance alone is between them.
    once_through = Scenario(1, int(POOL.length.sum()))
    for arm in ("fixed-2", "none", "informed", "clairvoyant"):
        outcome = run(arm, once_through)
        assert 1e3 * outcome.tokens / outcome.ms == pytest.approx(found[arm], rel=0.03)


def test_ours_repeats_what_it_decided_for_long_as_the_server_does(monkeypatch):
    """Everything is verified at this load: after a streak one step in eight is sized and learned from."""
    calls = {"size": 0, "observe": 0}
    for name in calls:
        method = getattr(Engine, name)

        def counted(self, *args, name=name, method=method, **kwargs):
            calls[name] += 1
            return method(self, *args, **kwargs)

        monkeypatch.setattr(Engine, name, counted)
    flat = CostModel.from_samples([VerifySample(t, 0, 5.0 + 0.001 * t) for t in (1, 8, 64)], [(1, 0.5)])
    outcome = run("ours", Scenario(4, 16_000), flat)
    assert calls["size"] < 0.6 * outcome.steps and abs(calls["size"] - calls["observe"]) <= LAG
    assert outcome.drafts > 0.9 * K * outcome.rows


def test_what_never_pays_is_not_drafted_by_those_who_know():
    hopeless = replace(POOL, run=np.zeros_like(POOL.run), truth=np.zeros_like(POOL.truth))
    for arm in ("clairvoyant", "informed", "informed-rate", "oracle"):
        outcome = run(arm, Scenario(4, 400), pool=hopeless)
        assert outcome.plain == outcome.steps


def test_shorter_drafts_cost_what_the_table_says_and_in_between_what_lies_between():
    """K = 7: of one token each and of all seven, 2 and 8 ms more than a verification; the host needs 20 ms to trim."""
    verify = [VerifySample(tokens, 0.0, 5.0 + tokens / 100) for tokens in (1, 64, 512)]
    table = CostModel.from_samples(verify, [(1, 8.0), (64, 8.0)], narrow_draft={1: [(1, 2.0), (64, 2.0)]})
    costs = drafting(table, K)
    assert [round(costs[width].draft_cost(8), 6) for width in (1, 2, 3, 6, 0)] == [2.0, 3.0, 4.0, 7.0, 8.0]
    assert set(drafting(TABLE, K)) == {0}
    for drafts, ms in ((1, 2.0), (3, 4.0), (7, 8.0)):
        outcome = run(f"fixed-{drafts}", Scenario(8, 2000), table)
        assert outcome.ms == pytest.approx(outcome.steps * (5.0 + 8 * (drafts + 1) / 100 + ms))
    host = run("fixed-3", Scenario(8, 2000, host_ms=(1.0, 30.0, 40.0)), table)
    assert host.ms == pytest.approx(30.0 * host.steps) and host.ragged == 0
    ours = run("ours", Scenario(8, 6000, host_ms=(1.0, 1.0, 20.0)), table)
    assert ours.ragged < ours.steps / 4, "trims that the host takes long for are measured and given up"
