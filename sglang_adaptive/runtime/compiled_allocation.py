"""The allocation of a step's budget as a server runs it on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_adaptive.policy.allocation import allocate
from sglang_adaptive.policy.config import PolicyConfig
from sglang_adaptive.runtime import allocation_kernel
from sglang_adaptive.runtime.device import compiled

logger = logging.getLogger(__name__)


def serving_allocation(
    max_requests: int,
    config: PolicyConfig,
    calibration: torch.Tensor,
    max_lens: Sequence[int | None] = (),
    group: Any = None,
) -> Callable[..., torch.Tensor]:
    """``allocate`` in one launch, compiled now for all shapes that serving meets; where the kernel does not take them
    all or cannot be compiled, on whichever rank of ``group``, ``compiled_allocation``."""
    served = allocation_kernel.takes(max_requests, calibration.shape[1], calibration)
    if served:
        try:
            allocation_kernel.compile_ahead(max_requests, calibration.shape[1], calibration.device)
        except Exception as error:
            logger.warning("sglang_adaptive: the kernel of the allocation failed (%s): torch.compile's is used.", error)
            served = False
    if group is not None and group.world_size > 1:
        # The two may differ in the last bit, and ranks must hand out alike.
        everywhere = torch.tensor(int(served))
        torch.distributed.all_reduce(everywhere, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        served = bool(everywhere)
    if served:
        return allocation_kernel.allocate
    return compiled_allocation(max_requests, config, calibration, max_lens)


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
