"""Open loops, several engines behind a router, and prompts between the steps."""

from __future__ import annotations

import numpy as np
import pytest
from simulator_cases import POOL, TABLE, Spy, run

from sglang_adaptive.benchmarks.simulator.loop import Scenario, simulate


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
