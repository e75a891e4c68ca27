"""Small things that the runtime does on the device: copies that wait for nothing, functions compiled ahead of use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

logger = logging.getLogger(__name__)


def async_h2d(values: torch.Tensor, device: Any) -> torch.Tensor:
    """The values on the device, without waiting for the copy."""
    if torch.device(device).type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def async_fill(into: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` from the CPU into a tensor on the device, without waiting; they may change afterwards."""
    into.copy_(values.pin_memory() if into.is_cuda else values, non_blocking=True)


def compiled(
    function: Callable[..., torch.Tensor], examples: Iterable[tuple[tuple[Any, ...], dict[str, Any]]], what: str
) -> Callable[..., torch.Tensor]:
    """``function`` under torch.compile, compiled now for the shapes of ``examples``; as it is where that fails.

    ``examples`` are positional and named arguments of calls such as serving will make; ``what`` is for the log.
    """
    fast = torch.compile(function, dynamic=True)
    try:
        with torch.no_grad():  # as when serving: the mode is one of the things that a compilation is for
            for positional, named in examples:
                fast(*positional, **named)
    except Exception as error:
        logger.warning("sglang_adaptive: torch.compile failed (%s): the %s runs uncompiled.", error, what)
        return function
    return fast
