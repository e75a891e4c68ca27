"""What a call costs to launch, on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def launches(call: Callable[[], Any]) -> int:
    """Kernels and copies that one call starts."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum("Activity Buffer" not in name for name in names)


def microseconds(call: Callable[[], Any], times: int = 300) -> float:
    """CPU time of one call, while the GPU keeps up."""
    spent = 0.0
    for _ in range(times):
        begin = time.perf_counter()
        call()
        spent += time.perf_counter() - begin
        torch.cuda.synchronize()
    return round(spent / times * 1e6, 1)
