"""Counts, per decode step, what a chrome trace of torch's profiler says of waiting and copying.

A step is one forward of the target, which the host marks as ``step[VERIFY bs=...]`` or ``step[DECODE bs=...]``; only
what lies between the first and the last such mark is counted.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_adaptive.errors import AdaptiveError

Event = dict[str, Any]

SYNCHRONISING = {
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
    "cudaMemcpy",
}
READBACK_OPS = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}
RUNTIME = ("cuda_runtime", "cuda_driver")
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
STEP_MARKS = ("step[VERIFY", "step[DECODE")


def load_events(path: Path) -> list[Event]:
    """Complete events of a trace, .json or .json.gz; ``ts`` and ``dur`` are microseconds."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def per_step(events: Iterable[Event], top: int = 12) -> dict[str, Any]:
    """What one step costs, on average over the steps between the first and the last mark.

    ``syncs`` counts synchronising calls by name and ``sync_ms`` is the time that the CPU spent in them; ``copies``
    counts copies by kind (``Memcpy DtoH (Device -> Pageable)`` blocks the CPU as well); ``readback_ops`` counts
    operators that read a value back. ``gpu_busy_ms`` is the union of kernels and copies, ``kernels`` their number,
    ``top_kernels``, ``top_calls`` and ``spans`` the largest as [name, ms, count]. Raises AdaptiveError for a trace
    without two marked steps.
    """
    events = list(events)
    marks = sorted(
        event["ts"]
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(STEP_MARKS)
    )
    if len(marks) < 2:
        raise AdaptiveError("The trace has fewer than two decode steps: profile while a request is decoding.")
    begin, end, steps = marks[0], marks[-1], len(marks) - 1
    inside = [event for event in events if begin <= event["ts"] < end]
    calls = [event for event in inside if event.get("cat") in RUNTIME]
    work = [event for event in inside if event.get("cat") in GPU_WORK]
    syncs = [event for event in calls if event["name"] in SYNCHRONISING]
    copies = [event for event in work if event["cat"] == "gpu_memcpy"]
    operators = [e for e in inside if e.get("cat") == "cpu_op" and e["name"] in READBACK_OPS]
    return {
        "steps": steps,
        "ms": (end - begin) / 1e3 / steps,
        "syncs": _counts(syncs, steps),
        "syncs_total": len(syncs) / steps,
        "sync_ms": sum(event.get("dur", 0) for event in syncs) / 1e3 / steps,
        "copies": _counts(copies, steps),
        "readback_ops": _counts(operators, steps),
        "gpu_busy_ms": _busy(work) / 1e3 / steps,
        "kernels": sum(event["cat"] == "kernel" for event in work) / steps,
        "launches": _counts([event for event in calls if "Launch" in event["name"]], steps),
        "top_kernels": _largest(work, steps, top),
        "top_calls": _largest(calls, steps, top),
        "spans": _largest([e for e in inside if e.get("cat") == "user_annotation"], steps, top),
    }


def _counts(events: Sequence[Event], steps: int) -> dict[str, float]:
    counted = Counter(event["name"] for event in events)
    return {name: count / steps for name, count in counted.most_common()}


def _busy(events: Sequence[Event]) -> float:
    """Length of the union of the events' times: kernels of several streams overlap."""
    total, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        last = event["ts"] + event.get("dur", 0)
        total += max(0.0, last - max(event["ts"], reached))
        reached = max(reached, last)
    return total


def _largest(events: Sequence[Event], steps: int, top: int) -> list[list[Any]]:
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in events:
        spent[event["name"]][0] += event.get("dur", 0) / 1e3 / steps
        spent[event["name"]][1] += 1 / steps
    ordered = sorted(spent.items(), key=lambda item: -item[1][0])[:top]
    return [[name[:90], round(ms, 4), round(count, 2)] for name, (ms, count) in ordered]


def table(results: dict[str, dict[str, Any]]) -> str:
    """A markdown table with one column per trace."""
    rows: dict[str, list[float]] = {}

    def row(label: str, values: Iterable[float]) -> None:
        rows[label] = list(values)

    row("steps in the trace", (result["steps"] for result in results.values()))
    row("ms per step (profiler on)", (result["ms"] for result in results.values()))
    row("GPU busy, ms", (result["gpu_busy_ms"] for result in results.values()))
    row("GPU idle, ms", (result["ms"] - result["gpu_busy_ms"] for result in results.values()))
    row("kernels", (result["kernels"] for result in results.values()))
    row("synchronising calls", (result["syncs_total"] for result in results.values()))
    row("time in them, ms", (result["sync_ms"] for result in results.values()))
    for group in ("syncs", "copies", "readback_ops", "launches"):
        for name in dict.fromkeys(name for result in results.values() for name in result[group]):
            row(name, (result[group].get(name, 0.0) for result in results.values()))
    lines = ["| per step | " + " | ".join(results) + " |", "| --- |" + " ---: |" * len(results)]
    lines += [f"| {label} | " + " | ".join(f"{value:.2f}" for value in values) + " |" for label, values in rows.items()]
    return "\n".join(lines)


def largest(results: dict[str, dict[str, Any]]) -> str:
    """The largest spans, calls and kernels of each trace, as text: where a step's time goes."""
    lines = []
    for name, result in results.items():
        for group in ("spans", "top_calls", "top_kernels"):
            lines.append(f"\n{name}, {group} (ms and count per step):")
            lines += [f"  {ms:9.4f} {count:8.2f}  {label}" for label, ms, count in result[group]]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Compare profiler traces: synchronising calls, copies, launches and GPU time per decode step."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks trace_syncs", description=main.__doc__)
    parser.add_argument("traces", nargs="+", help="FILE or NAME=FILE")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--top", type=int, default=12, help="so many largest kernels and calls")
    arguments = parser.parse_args(argv)
    results = {}
    for given in arguments.traces:
        name, _, path = given.rpartition("=")
        results[name or Path(path).name] = per_step(load_events(Path(path)), arguments.top)
    print(table(results) + "\n" + largest(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0
