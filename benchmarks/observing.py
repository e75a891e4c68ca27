"""What metrics and a trace cost a step on the CPU: on the scheduler's thread, and on the thread that writes the trace.

Both off is the baseline: the sums that /server_info shows are always kept. Times are CPU times of the process, so other
work on the machine lengthens them little. What a trace adds on the GPU is not in them.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge

from sglang_adaptive.observe.metrics import Exporter
from sglang_adaptive.policy.budget import TRIMMED, Decision
from sglang_adaptive.runtime import trace_features
from sglang_adaptive.runtime.counters import Counters
from sglang_adaptive.runtime.relay import StepRecord
from sglang_adaptive.runtime.trace import TraceRecorder

# The host's default of --decode-log-interval: metrics are written once in so many steps.
METRICS_EVERY = 40


def records(requests: int, gamma: int, steps: int, seed: int = 0) -> list[StepRecord]:
    """Finished steps of ``requests`` requests, made up, with what a trace keeps of the draft's distributions."""
    rng = np.random.default_rng(seed)
    made = []
    for n in range(steps):
        verified = rng.integers(0, gamma + 1, requests)
        made.append(
            StepRecord(
                iteration=n,
                slots=np.arange(requests),
                generations=np.zeros(requests, np.int64),
                kv_tokens=700.0 * requests,
                confidence=rng.beta(3.0, 1.5, (requests, gamma)).astype(np.float32),
                verify_lens=verified + 1,
                commit_lens=rng.integers(0, verified + 1) + 1,
                step_ms=float(rng.uniform(5.0, 9.0)),
                decision=Decision(int(verified.sum()), True, False, 2.0 * requests, 7.0, TRIMMED),
                extra=rng.random((requests, trace_features.width(gamma))).astype(np.float32),
            )
        )
    return made


def _collector() -> Any:
    """Stands for the host's collector: its labels, and classes of prometheus_client with a registry of their own."""
    own = {"registry": CollectorRegistry()}
    classes = {"_counter_cls": partial(Counter, **own), "_gauge_cls": partial(Gauge, **own)}
    return SimpleNamespace(labels={"model_name": "m", "tp_rank": 0}, **classes)


def cpu_us(
    steps: Sequence[StepRecord], each: Callable[[int, StepRecord], None], end: Callable[[], None]
) -> list[float]:
    """[2] CPU time per step in us: of this thread, and of the others."""
    process, thread = time.process_time(), time.thread_time()
    for number, step in enumerate(steps, 1):
        each(number, step)
    mine = time.thread_time() - thread
    end()
    others = time.process_time() - process - (time.thread_time() - thread)
    return [1e6 * mine / len(steps), 1e6 * max(others, 0.0) / len(steps)]


def measure(requests: int, gamma: int, count: int, folder: Path) -> dict[str, list[float]]:
    """What each costs in us per step, on the scheduler's thread and on others."""
    steps = records(requests, gamma, count)
    always, watched = Counters(gamma), Counters(gamma)
    exporter = Exporter(_collector(), watched)
    recorder = TraceRecorder(folder / "steps.trace", gamma)

    def metrics(number: int, step: StepRecord) -> None:
        watched.observe(step)
        if number % METRICS_EVERY == 0:
            exporter.write()

    def trace(number: int, step: StepRecord) -> None:
        recorder.record(step, step.decision)
        if number % 64 == 0:
            time.sleep(0.01)  # the writer has as long as in a server, where a step takes milliseconds

    kept = cpu_us(steps, lambda _, step: always.observe(step), lambda: None)
    with_metrics = cpu_us(steps, metrics, lambda: None)
    return {
        "sums (always)": kept,
        "metrics": [with_metrics[0] - kept[0], with_metrics[1]],
        "trace": cpu_us(steps, trace, recorder.close),
    }


def main(argv: Sequence[str]) -> int:
    """Time what metrics and a trace cost a step, in microseconds of CPU time."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks observing", description=main.__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--step-ms", type=float, default=5.0, help="to put it into proportion (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments.requests, arguments.drafts, arguments.steps, Path(folder))
    print(f"{platform.processor() or platform.machine()}, {arguments.requests} requests, K = {arguments.drafts}\n")
    print(f"| what | scheduler, us | other threads, us | of a step of {arguments.step_ms:g} ms, % |")
    print("| --- | ---: | ---: | ---: |")
    for name, (mine, others) in found.items():
        print(f"| {name} | {mine:.1f} | {others:.1f} | {(mine + others) / (10 * arguments.step_ms):.2f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0
