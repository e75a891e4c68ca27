"""How long the CPU takes to size a step, at the sizes that the project promises something about."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sglang_adaptive.benchmarks.stats import percentiles
from sglang_adaptive.policy.cost import CostModel, VerifySample
from sglang_adaptive.policy.engine import Engine, PolicyConfig

CASES = ((64, 7), (256, 7), (1024, 15))
LEARN_STEPS = 200


def engine(requests: int, drafts: int) -> Engine:
    """An engine that has learned: a table with sixteen contexts in force, corrected, and a calibration that is no
    identity, so that a step pays for all of it."""
    largest = requests * (drafts + 1)
    step = max(8, largest // 128)
    contexts = np.linspace(0.0, requests * 4096.0, 16)
    samples = [
        VerifySample(tokens, kv, 5.0 + 0.01 * tokens + 2e-6 * kv)
        for tokens in range(step, largest + 1, step)
        for kv in contexts
    ]
    draft = [(1, 1.0), (requests, 1.5)]
    made = Engine(
        PolicyConfig(), CostModel.from_samples(samples, draft, [(1, 0.1), (largest, 0.4)], 0.1, largest), drafts
    )
    made.cost.prepare(largest)
    return made


def measure(requests: int, drafts: int, calls: int, clock: Callable[[], float]) -> dict[str, float | None]:
    """p50, p90 and p99 of ``Engine.size`` in microseconds by ``clock`` (s), between calls of ``Engine.observe``."""
    made, rng, times = engine(requests, drafts), np.random.default_rng(0), []
    fresh = np.ones(requests, bool)
    fresh[:2] = False
    for n in range(LEARN_STEPS + calls):
        confidence = rng.beta(3.0, 1.5, (requests, drafts)).astype(np.float32)
        kv_tokens = float(rng.uniform(0.4, 0.6) * requests * 4096.0)
        begin = clock()
        decision = made.size(confidence, requests=requests, non_draft_tokens=requests, kv_tokens=kv_tokens, fresh=fresh)
        if n >= LEARN_STEPS:
            times.append(clock() - begin)
        verified = np.full(requests, decision.budget // requests)
        passed = np.logical_and.accumulate(rng.random((requests, drafts)) < 0.9 * confidence, axis=1).sum(axis=1)
        made.observe(
            requests=requests,
            non_draft_tokens=requests,
            draft_tokens=int(verified.sum()),
            kv_tokens=kv_tokens,
            committed_tokens=requests + int(np.minimum(verified, passed).sum()),
            step_ms=1.1 * decision.predicted_ms,
            drafted=decision.draft,
            confidence=confidence if decision.draft else None,
            verified=verified,
            accepted=np.minimum(verified, passed),
        )
    return percentiles(times, 1e6)


def main(argv: Sequence[str]) -> int:
    """Time the sizing of a step on this CPU, in microseconds of one thread."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks sizing", description=main.__doc__)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    arguments = parser.parse_args(argv)
    results, lines = (
        [],
        ["| requests x drafts | clock | median, us | p90, us | p99, us |", "| --- | --- |" + " ---: |" * 3],
    )
    for requests, drafts in CASES:
        for name, clock in (("CPU time of the thread", time.thread_time), ("wall", time.perf_counter)):
            found = measure(requests, drafts, arguments.calls, clock)
            results.append({"requests": requests, "drafts": drafts, "clock": name, **found})
            values = " | ".join(f"{found[f'p{q}']:.0f}" for q in (50, 90, 99))
            lines.append(f"| {requests} x {drafts} | {name} | {values} |")
    print(f"{platform.processor() or platform.machine()}, {platform.python_version()}, numpy {np.__version__}\n")
    print("\n".join(lines))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
