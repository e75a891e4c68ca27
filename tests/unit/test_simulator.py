"""The simulator: its clock and its books are right, and nobody in it knows more than it should."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_adaptive.benchmarks.simulator import bound, derive, replay, tables, traffic
from sglang_adaptive.benchmarks.simulator.arms import Arm, Fixed, Ours, Plan, maker, top_budget
from sglang_adaptive.benchmarks.simulator.loop import LAG, TRIM_MS, Scenario, simulate
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.policy.allocation import allocate_reference
from sglang_adaptive.policy.cost import CostModel, VerifySample
from sglang_adaptive.policy.engine import Engine
from sglang_adaptive.policy.survival import survival
from sglang_adaptive.runtime.relay import StepRecord
from sglang_adaptive.runtime.trace import TraceRecorder, read_trace

K = 7
TABLE, _ = tables.load_table("v4-pro-8xb300")
STEEP = CostModel.from_samples([VerifySample(t, 0, 1.0 + 0.25 * t) for t in range(1, 400)], [(1, 0.5)])
POOL = traffic.generate(traffic.named("mixed"), K, 1, requests=64)


def run(arm: str, scenario: Scenario, table: CostModel = TABLE, pool: traffic.Pool = POOL, seed: int = 0):
    return simulate(maker(arm, K, table, table, TRIM_MS), table, pool, scenario, seed)


# -- allocation --


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6), st.integers(0, 30), st.randoms(use_true_random=False))
def test_budgets_are_handed_out_as_the_server_does(requests, budget, random):
    # Halves and quarters multiply exactly in float32: ties are ties.
    confidence = np.array(
        [[random.choice([0.0, 0.25, 0.5, 1.0]) for _ in range(4)] for _ in range(requests)], np.float32
    )
    wanted = allocate_reference(confidence, budget) - 1
    assert top_budget(survival(confidence), budget).tolist() == wanted.tolist()


# -- tables --


def test_the_shipped_tables_are_what_their_derivation_says():
    for name, derived in derive.DERIVED.items():
        model, key = derived()
        shipped, shipped_key = tables.load_table(name)
        assert shipped_key == key
        for field in ("tiers", "kv_points", "verify_ms", "draft_points", "draft_ms"):
            np.testing.assert_allclose(getattr(shipped, field), getattr(model, field))
        assert (shipped.overhead_ms, shipped.capture_limit) == (model.overhead_ms, model.capture_limit)


def test_the_published_throughputs_come_back_from_the_table():
    for c, none, fixed in zip(derive.CONCURRENCY, derive.PUBLISHED["none"], derive.PUBLISHED["fixed 7"], strict=True):
        assert 1e3 * c / TABLE.point_ms(c, c, c, 0.0, draft=False) == pytest.approx(none, rel=0.04)
        with_seven = 1e3 * c * derive.ACCEPTED_WITH_7 / TABLE.point_ms(c, 8 * c, 8 * c, 0.0)
        assert with_seven == pytest.approx(fixed, rel=0.04)


@pytest.mark.parametrize("error", tables.ERRORS)
def test_a_misjudged_table_is_wrong_where_it_should_be_and_still_a_table(error):
    wrong, (low, high, draft) = tables.misjudged(STEEP, error), tables.ERRORS[error]
    assert wrong.verify_ms[0, 0] == pytest.approx(low * STEEP.verify_ms[0, 0])
    assert wrong.verify_ms[-1, 0] >= high * STEEP.verify_ms[-1, 0] - 1e-9
    assert wrong.draft_cost(1) == pytest.approx(draft * STEEP.draft_cost(1))
    assert (np.diff(wrong.verify_ms, axis=0) >= 0).all()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"key": {}}', b"\xff"])
def test_a_file_that_is_no_table_is_one_clear_error(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(AdaptiveError, match="no usable cost table"):
        tables.load_table(str(tmp_path / "t.json"))
    with pytest.raises(AdaptiveError, match="There is no cost table 'nowhere'"):
        tables.load_table("nowhere")


# -- traffic --


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


# -- the clock and the books --


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


# -- what arms may know --


class Spy(Arm):
    learns = True

    def __init__(self):
        self.views, self.records = [], []

    def decide(self, view):
        stale, known = view.stale()
        self.views.append((view.slots.copy(), view.memory.owner[view.slots].copy(), stale, known.copy(), view.live()))
        return Plan(np.full(view.requests, 1), ragged=True)

    def learn(self, record):
        self.records.append((len(self.views), record))


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


# -- loads --


def test_an_open_loop_below_capacity_serves_what_arrives():
    scenario = Scenario(64, 30_000, arrivals_per_s=1.0)
    outcome = run("fixed-3", scenario)
    offered = 1.0 * POOL.length.mean()
    assert 1e3 * outcome.tokens / outcome.ms == pytest.approx(offered, rel=0.3)
    assert len(outcome.latency_ms) > 50 and min(outcome.latency_ms) > 0
    slower = run("none", scenario)
    assert np.median(slower.token_ms) > np.median(outcome.token_ms)


def test_an_open_loop_above_capacity_queues():
    crowded = run("none", Scenario(4, 20_000, arrivals_per_s=100.0))
    assert 1e3 * crowded.tokens / crowded.ms == pytest.approx(4e3 / TABLE.point_ms(4, 4, 4, 0.0, draft=False), rel=0.02)
    assert np.percentile(crowded.latency_ms, 90) > 2 * np.percentile(crowded.latency_ms, 5)


@pytest.mark.parametrize("router", ["round-robin", "least-loaded"])
def test_two_engines_serve_twice_as_much(router):
    one, two = run("none", Scenario(8, 8000)), run("none", Scenario(16, 16_000, engines=2, router=router))
    assert two.tokens / two.ms == pytest.approx(2 * one.tokens / one.ms, rel=0.1)


def test_the_least_loaded_router_keeps_engines_even():
    speeds = {}
    for router in ("round-robin", "least-loaded"):
        outcome = run("fixed-5", Scenario(24, 60_000, engines=4, router=router))
        speeds[router] = outcome.tokens / outcome.ms
    assert speeds["least-loaded"] > speeds["round-robin"]


@pytest.mark.parametrize("mode", ["separate", "mixed"])
def test_prompts_take_time(mode):
    with_prompts = run("fixed-2", Scenario(16, 30_000, prefill=mode))
    without = run("fixed-2", Scenario(16, 30_000))
    prompt_tokens = 30_000 / POOL.length.mean() * POOL.prompt.mean()
    ratio = with_prompts.ms / without.ms
    assert 1.05 < ratio < 1 + 3 * prompt_tokens * TABLE.point_ms(1, 2048, 1, 0.0) / 2048 / without.ms


def test_prompt_steps_are_not_taken_for_decode_steps():
    spy = Spy()
    simulate(lambda: spy, TABLE, POOL, Scenario(4, 6000, prefill="separate"), 0)
    unknown = [record.step_ms is None for _, record in spy.records]
    assert 5 < sum(unknown) < len(unknown) / 2


# -- replay --


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
