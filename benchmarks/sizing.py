"""How long the CPU takes to size a step, at the sizes that the project promises something about.

One and the same sequence of steps is replayed several times. As measured, the percentiles are over all steps of all
replays: what a host on this machine sees, its neighbours included. The least time of a step over the replays is what
its own code needs: work that comes periodically stays in it, other processes do not. A fixed piece of work of about the
same length, timed between the steps, says how much of the spread is the machine's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_adaptive.benchmarks.stats import percentiles
from sglang_adaptive.policy.cost import CostModel, VerifySample
from sglang_adaptive.policy.engine import Decision, Engine, PolicyConfig
from sglang_adaptive.runtime.relay import OVERLAP_LAG, StepRelay

CASES = ((64, 7), (256, 7), (1024, 15))
LEARN_STEPS = 200
# Share of the requests that end in a step; their slots go to new requests, which show no confidence for two steps.
LEAVING = 1 / 128


@dataclass
class Times:
    """Seconds per step: thread CPU time and wall time of the sizing, thread CPU time of the rest."""

    sizing: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    learning: list[float] = field(default_factory=list)
    fixed: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


def engine(requests: int, drafts: int) -> Engine:
    """An engine for a table with sixteen contexts and a hundred tiers, at which drafting and trimming pay."""
    largest = requests * (drafts + 1)
    step = max(8, largest // 128)
    contexts = np.linspace(0.0, requests * 4096.0, 16)
    samples = [
        VerifySample(tokens, kv, 5.0 + 0.004 * tokens + 2e-6 * kv)
        for tokens in range(step, largest + 1, step)
        for kv in contexts
    ]
    draft = [(1, 1.0), (requests, 1.5)]
    made = Engine(
        PolicyConfig(), CostModel.from_samples(samples, draft, [(1, 0.1), (largest, 0.4)], 0.1, largest), drafts
    )
    made.cost.prepare(largest)
    return made


def replay(requests: int, drafts: int, steps: int, seed: int = 0) -> Times:
    """Serve ``steps`` steps after ``LEARN_STEPS`` untimed ones: read the relay and size, "launch", learn."""
    made, rng, times = engine(requests, drafts), np.random.default_rng(seed), Times()
    profiled = made.cost
    relay = StepRelay(num_slots=2 * requests, gamma=drafts, max_requests=requests, device="cpu", lag=OVERLAP_LAG)
    slots = rng.permutation(2 * requests)[:requests].astype(np.int64)
    generations, decisions = np.zeros(requests, np.int64), dict[int, Decision]()
    gc.collect()
    for n in range(LEARN_STEPS + steps):
        kv_tokens = float(rng.uniform(0.4, 0.6) * requests * 4096.0)
        records = relay.collect(n)
        begin_wall, begin = time.perf_counter(), time.thread_time()
        confidence, fresh = relay.read(slots, generations)
        decision = made.size(confidence, requests=requests, non_draft_tokens=requests, kv_tokens=kv_tokens, fresh=fresh)
        sized, sized_wall = time.thread_time(), time.perf_counter()
        for record in records:
            _learn(made, record, profiled, decisions.pop(record.iteration))
        learned = time.thread_time()
        _fixed_work()
        worked = time.thread_time()
        if n >= LEARN_STEPS:
            times.sizing.append(sized - begin)
            times.wall.append(sized_wall - begin_wall)
            times.learning.append(learned - sized)
            times.fixed.append(worked - learned)
            times.reasons[decision.reason] += 1
        decisions[n] = decision
        _launch(relay, n, decision, slots, generations, kv_tokens, rng, drafts)
        generations = generations + (rng.random(requests) < LEAVING)
    return times


def _launch(
    relay: StepRelay,
    iteration: int,
    decision: Decision,
    slots: np.ndarray,
    generations: np.ndarray,
    kv_tokens: float,
    rng: np.random.Generator,
    drafts: int,
) -> None:
    """The device's part, made up: a head that is a tenth too sure, and outcomes by chance."""
    confidence = rng.beta(3.0, 1.5, (len(slots), drafts)).astype(np.float32)
    outcomes = rng.random(confidence.shape)
    common = {"iteration": iteration, "slots": slots, "generations": generations, "kv_tokens": kv_tokens}
    if not decision.draft:
        relay.publish(**common, confidence=None, verify_lens=None, commit_lens=None, decision=decision)
        return
    verified = np.full(len(slots), decision.budget // len(slots))
    passed = np.logical_and.accumulate(outcomes < 0.9 * confidence, axis=1).sum(axis=1)
    relay.publish(
        **common,
        confidence=torch.from_numpy(confidence),
        verify_lens=torch.from_numpy(1 + verified),
        commit_lens=torch.from_numpy(1 + np.minimum(verified, passed)),
        decision=decision,
    )


def _learn(made: Engine, record: Any, profiled: CostModel, decision: Decision) -> None:
    """As the planner does, from steps that take a tenth longer than profiled."""
    requests, tokens = len(record.slots), int(record.verify_lens.sum())
    made.observe(
        requests=requests,
        non_draft_tokens=requests,
        draft_tokens=tokens - requests,
        kv_tokens=record.kv_tokens,
        committed_tokens=int(record.commit_lens.sum()),
        step_ms=1.1 * profiled.point_ms(requests, tokens, tokens, record.kv_tokens, decision.draft),
        drafted=decision.draft,
        confidence=record.confidence,
        verified=record.verify_lens - 1,
        accepted=record.commit_lens - 1,
    )


_OPERAND = np.linspace(0.0, 1.0, 2048)


def _fixed_work(rounds: int = 20) -> float:
    total = 0.0
    for n in range(rounds):
        total += float(np.sort(_OPERAND * n)[n])
    return total


def summary(replays: Sequence[Times]) -> dict[str, dict[str, float | None]]:
    """Percentiles in us of every clock."""

    def pooled(of: Callable[[Times], list[float]]) -> dict[str, float | None]:
        return percentiles([value for times in replays for value in of(times)], 1e6)

    least = np.min([times.sizing for times in replays], axis=0)
    return {
        "sizing, thread CPU time": pooled(lambda times: times.sizing),
        "sizing, thread CPU time, least of the replays": percentiles(least.tolist(), 1e6),
        "sizing, wall": pooled(lambda times: times.wall),
        "learning, thread CPU time": pooled(lambda times: times.learning),
        "fixed work, thread CPU time": pooled(lambda times: times.fixed),
    }


def main(argv: Sequence[str]) -> int:
    """Time the sizing of a step on this CPU, in microseconds: reading the relay and Engine.size."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks sizing", description=main.__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="steps per replay (%(default)s)")
    parser.add_argument("--replays", type=int, default=5, help="times that every sequence is replayed (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = []
    print(f"{platform.processor() or platform.machine()}, {platform.python_version()}, numpy {np.__version__}\n")
    print("| requests x drafts | what | median, us | p90, us | p99, us |\n| --- | --- | ---: | ---: | ---: |")
    for requests, drafts in CASES:
        load = [os.getloadavg()[0]]
        replays = [replay(requests, drafts, arguments.calls) for _ in range(arguments.replays)]
        load.append(os.getloadavg()[0])
        found = summary(replays)
        for what, values in found.items():
            shown = " | ".join(f"{values[f'p{q}']:.0f}" for q in (50, 90, 99))
            print(f"| {requests} x {drafts} | {what} | {shown} |", flush=True)
        reasons = dict(replays[0].reasons)
        results.append({"requests": requests, "drafts": drafts, "load": load, "reasons": reasons, "us": found})
    for result in results:
        shares = ", ".join(f"{count} {reason}" for reason, count in result["reasons"].items())
        print(f"\n{result['requests']} x {result['drafts']}: {shares}; load average {result['load']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
