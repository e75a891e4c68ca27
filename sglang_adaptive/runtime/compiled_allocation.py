"""The allocation of a step's budget as a server runs it on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_adaptive.policy.allocation import allocate
from sglang_adaptive.policy.config import PolicyConfig
from sglang_adaptive.runtime.device import compiled


def compiled_allocation(
    max_requests: int, config: PolicyConfig, calibration: torch.Tensor, max_lens: Sequence[int | None] = ()
) -> Callable[..., torch.Tensor]:
    """``allocate`` under torch.compile, compiled now for all shapes that serving meets, with each of ``max_lens``
    (by default that of ``config``); as it is where that fails."""
    gamma, device = calibration.shape[1], calibration.device
    common = {"min_len": config.min_len, "calibration": calibration}
    examples = (
        ((torch.full((requests, gamma), 0.5, device=device), budget), {**common, "max_len": max_len})
        for max_len in max_lens or (config.max_len,)
        for requests in sorted({1, 2, max_requests})
        for budget in (0, 1, 2, 3)
    )
    return compiled(allocate, examples, "allocation")
