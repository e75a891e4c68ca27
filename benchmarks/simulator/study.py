"""Many simulations side by side: every arm in every cell with every seed, on all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sglang_adaptive.benchmarks.simulator import replay, traffic
from sglang_adaptive.benchmarks.simulator.arms import maker
from sglang_adaptive.benchmarks.simulator.loop import TRIM_MS, Scenario, simulate
from sglang_adaptive.benchmarks.simulator.tables import load_table, misjudged
from sglang_adaptive.benchmarks.simulator.traffic import Pool

GAMMA = 7
EXACT = "exact"
HEADS = {"head-30": 0.7, "head+30": 1.3}
LEARNING = 4


@dataclass(frozen=True)
class Task:
    """One simulation. ``traffic`` is a name or the path of a trace; ``wrong`` says what the policy starts out wrong
    about: ``exact`` (nothing), an entry of ``tables.ERRORS``, ``head-30`` or ``head+30``, or two joined by a blank."""

    table: str
    traffic: str
    wrong: str
    arm: str
    scenario: Scenario
    seed: int


@dataclass(frozen=True)
class Plan:
    tables: tuple[str, ...]
    traffics: tuple[str, ...]
    wrongs: tuple[str, ...]
    arms: tuple[str, ...]
    concurrency: tuple[int, ...]
    seeds: int
    tokens_per_user: int
    least_tokens: int
    scenario: Scenario

    def tasks(self) -> list[Task]:
        """All simulations; arms that believe nothing run once, whatever a policy is wrong about."""
        return [
            Task(table, kind, wrong, arm, self._at(c), seed)
            for c in sorted(self.concurrency, reverse=True)
            for table in self.tables
            for kind in self.traffics
            for arm in self.arms
            for wrong in (self.wrongs if believes(arm) else (EXACT,))
            for seed in range(self.seeds)
        ]

    def _at(self, concurrency: int) -> Scenario:
        tokens = max(self.tokens_per_user * concurrency, self.least_tokens) * self.scenario.engines
        return replace(self.scenario, concurrency=concurrency, tokens=tokens)


def believes(arm: str) -> bool:
    """Whether the arm acts on a cost table and confidences that may be wrong."""
    return arm.startswith(("ours", "stock"))


def run_task(task: Task) -> dict[str, Any]:
    """One simulation, as plain values; ``learning`` is tokens per ms over the first fifth of the tokens."""
    table, _ = load_table(task.table)
    factor, believed = 1.0, table
    for part in task.wrong.split():
        if part in HEADS:
            factor = HEADS[part]
        else:
            believed = misjudged(believed, part)
    requests = pool(task.traffic, factor, task.seed)
    arm = maker(task.arm, requests.gamma, believed, table, TRIM_MS)
    outcome = simulate(arm, table, requests, task.scenario, task.seed)
    tokens, ms = outcome.curve[LEARNING - 1]
    result = {
        **{name: getattr(task, name) for name in ("wrong", "arm", "seed")},
        **{name: Path(getattr(task, name)).name for name in ("table", "traffic")},
        **asdict(task.scenario),
        **{name: getattr(outcome, name) for name in ("steps", "plain", "ragged", "rows", "drafts", "accepted")},
        "tok_s": 1e3 * outcome.tokens / outcome.ms,
        "learning_tok_s": 1e3 * tokens / ms,
    }
    if outcome.latency_ms:
        for name, values in (("latency_ms", outcome.latency_ms), ("token_ms", outcome.token_ms)):
            result |= {f"{name}_p50": float(np.median(values)), f"{name}_p99": float(np.percentile(values, 99))}
    return result


@lru_cache(maxsize=3)
def pool(kind: str, factor: float, seed: int) -> Pool:
    """The requests of a kind of traffic, or of a trace, with confidences ``factor`` times what they should be."""
    if kind not in traffic.TRAFFIC and replay.is_trace(kind):
        return replay.from_file(kind, seed)
    return traffic.generate(traffic.wrong_head(traffic.named(kind), factor), GAMMA, seed)


def identity(task: Task) -> tuple[Any, ...]:
    """What a result of ``task`` says about where it comes from; ``found_in`` of the result is the same."""
    return (
        Path(task.table).name,
        Path(task.traffic).name,
        task.wrong,
        task.arm,
        task.seed,
        *asdict(task.scenario).values(),
    )


def found_in(result: dict[str, Any]) -> tuple[Any, ...]:
    names = ("table", "traffic", "wrong", "arm", "seed", *(field.name for field in fields(Scenario)))
    found = (result.get(name) for name in names)
    # JSON knows no tuples.
    return tuple(tuple(value) if isinstance(value, list) else value for value in found)


def run_all(tasks: list[Task], jobs: int, on_done: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Results in the order of ``tasks``; ``on_done`` is called with each."""
    if jobs == 1:
        return [result for task in tasks for result in _announced(task, on_done)]
    with ProcessPoolExecutor(jobs) as workers:
        futures = {workers.submit(run_task, task): at for at, task in enumerate(tasks)}
        results: dict[int, dict[str, Any]] = {}
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            on_done(results[futures[future]])
    return [results[at] for at in range(len(tasks))]


def _announced(task: Task, on_done: Callable[[dict[str, Any]], None]) -> Iterator[dict[str, Any]]:
    result = run_task(task)
    yield result
    on_done(result)
