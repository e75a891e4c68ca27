"""Tables, requests and an arm that watches, for the simulator's tests."""

from __future__ import annotations

import numpy as np

from sglang_adaptive.benchmarks.simulator import tables, traffic
from sglang_adaptive.benchmarks.simulator.arms import Arm, Plan, maker
from sglang_adaptive.benchmarks.simulator.loop import TRIM_MS, Scenario, simulate
from sglang_adaptive.policy.cost import CostModel, VerifySample

K = 7
TABLE, _ = tables.load_table("v4-pro-8xb300")
STEEP = CostModel.from_samples([VerifySample(t, 0, 1.0 + 0.25 * t) for t in range(1, 400)], [(1, 0.5)])
POOL = traffic.generate(traffic.named("mixed"), K, 1, requests=64)


def run(arm: str, scenario: Scenario, table: CostModel = TABLE, pool: traffic.Pool = POOL, seed: int = 0):
    return simulate(maker(arm, K, table, table, TRIM_MS), table, pool, scenario, seed)


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
