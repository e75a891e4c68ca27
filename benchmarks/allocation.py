"""How many kernels the allocation of a step's budget takes on the device, and how long.

It is the one that a server uses on that device. Kernels are counted by torch's profiler, copies and memory sets among
them; the time is what the device needs for one allocation of many, launched one after the other without waiting.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.policy.allocation import allocate
from sglang_adaptive.policy.config import PolicyConfig

CASES = ((1, 7), (32, 7), (256, 7), (256, 15))


def main(argv: Sequence[str]) -> int:
    """Count and time the kernels of an allocation; writes a table, and all numbers with --json."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks allocation", description=main.__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=200, help="allocations that are timed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise AdaptiveError("There is no CUDA GPU: --device cpu runs it here, without kernels to count.")
    rows = [measure(requests, drafts, args.device, args.rounds) for requests, drafts in CASES]
    print("| requests x drafts | kernels | us on the device | lengths equal those computed uncompiled |")
    print("| ---: | ---: | ---: | --- |")
    for row in rows:
        print(f"| {row['requests']} x {row['drafts']} | {row['kernels']} | {row['us']:.1f} | {row['equal']} |")
    for row in rows:
        print(f"{row['requests']} x {row['drafts']}: " + ", ".join(row["names"]))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


def measure(requests: int, drafts: int, device: str, rounds: int) -> dict[str, Any]:
    """``kernels``, ``us`` and ``names`` for R requests of K drafts; ``equal``: compiling changed no length."""
    from sglang_adaptive.runtime.compiled_allocation import serving_allocation  # compiles: for those who need it

    calibration = torch.tensor([[0.1], [0.9]], device=device).repeat(1, drafts)
    config = PolicyConfig()
    fast = serving_allocation(requests, config, calibration)
    generator = torch.Generator(device=device).manual_seed(1)
    confidence = torch.rand((requests, drafts), device=device, generator=generator)
    named = {"min_len": config.min_len, "max_len": config.max_len, "calibration": calibration, "weights": None}
    budget = requests * drafts // 2

    def call() -> torch.Tensor:
        return fast(confidence, budget, **named)

    for _ in range(3):
        call()
    equal = bool((call() == allocate(confidence, budget, **named)).all())
    names = _kernels(call, device)
    return {
        "requests": requests,
        "drafts": drafts,
        "kernels": len(names),
        "us": _microseconds(call, device, rounds),
        "equal": equal,
        "names": names,
    }


def _kernels(call: Callable[[], Any], device: str) -> list[str]:
    """What one call runs on the device, in order."""
    if torch.device(device).type != "cuda":
        return []
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        call()
        torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def _microseconds(call: Callable[[], Any], device: str, rounds: int) -> float:
    if torch.device(device).type != "cuda":
        began = time.perf_counter()
        for _ in range(rounds):
            call()
        return (time.perf_counter() - began) / rounds * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # so that the CPU's launches are not what is timed
        call()
    start.record()
    for _ in range(rounds):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / rounds * 1e3
