"""The allocation of a step's budget in one launch: ``policy.allocation.allocate`` as a kernel.

As those of packed rows it is there to save time on the CPU, not on the GPU. One program holds the survivals of the
whole batch and finds, bit by bit, the least one that the budget reaches; nothing is sorted.

Bit for bit, whatever the input is: the sum of the lengths; the order of equal survivals; that a survival is a function
of its request's confidences up to its position and never exceeds the one before it, so that a share is a prefix and
what follows a token has no say in its place.

Survivals are multiplied in float32 from the first position on, as in ``allocate_reference``: without a calibration they
are that one's to the last bit, and those of ``allocate`` wherever products are exact. In general it multiplies in other
orders, on each device in its own, and may differ in the last bits. A calibration, be it the identity, takes the GPU's
own logarithm and exponential function: its confidences are within 1e-6 of those of ``allocate``. Tokens whose survivals
are no further apart than that may change places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_adaptive.policy import allocation
from sglang_adaptive.policy.logistic import LOGIT_LIMIT
from sglang_adaptive.runtime.packed_rows import runs_on

# Requests of a program, and its warps.
_ROWS = {32: 1, 128: 4, 512: 8, 2048: 16}
# Drafts of each request that a program can take.
_WIDTHS = 8, 16
MOST_REQUESTS, MOST_DRAFTS = max(_ROWS), max(_WIDTHS)

_LIMIT = tl.constexpr(LOGIT_LIMIT)
# The bits of infinity, and the highest bit of a float32 that is not negative: such numbers are ordered as their bits.
_INFINITY = tl.constexpr(0x7F800000)
_HIGHEST = tl.constexpr(1 << 30)


def allocate(
    confidence: torch.Tensor,
    budget: int | torch.Tensor,
    *,
    min_len: int = 1,
    max_len: int | None = None,
    weights: torch.Tensor | None = None,
    calibration: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``policy.allocation.allocate``, to which all is handed over that the kernel does not take.

    It takes up to ``MOST_REQUESTS`` requests of up to ``MOST_DRAFTS`` drafts, float32 tensors on a GPU, and a budget
    that is a number. The lengths are in memory of their own: later steps leave them alone.
    """
    requests, width = confidence.shape
    most = width if max_len is None else min(width, max_len - 1)
    if (
        not (0 < requests <= MOST_REQUESTS and 0 < most <= MOST_DRAFTS)
        or isinstance(budget, torch.Tensor)
        or not _takes(confidence, requests, width)
        or not (weights is None or _takes(weights, requests))
        or not (calibration is None or _takes(calibration, 2, width))
    ):
        return allocation.allocate(
            confidence, budget, min_len=min_len, max_len=max_len, weights=weights, calibration=calibration
        )
    rows, chances = _rows(requests), _by_row(confidence)
    coefficients = None if calibration is None else _by_row(calibration)
    out = torch.empty(requests, dtype=torch.int32, device=confidence.device)
    _allocate[(1,)](
        chances,
        # Without weights or coefficients, any address: the kernel leaves it alone.
        chances if weights is None else weights.contiguous(),
        chances if coefficients is None else coefficients,
        out,
        requests,
        most,
        # More than there is to give is no more than all of it, and less than nothing is nothing: both fit an int32.
        max(0, min(budget, requests * most)),
        min_len - 1,
        chances.stride(0),
        -1 if coefficients is None else coefficients.stride(0),
        0 if weights is None else 1,
        rows,
        _width(most),
        num_warps=_ROWS[rows],
    )
    return out


def compile_ahead(max_requests: int, width: int, device: torch.device | str) -> None:
    """Compile for batches of up to ``max_requests`` of up to ``width`` drafts, so that no step waits for it.

    That is one kernel for each size of a program up to the one that they need, eight at most. Batch size, budget,
    limits of lengths, weights and coefficients are no reason for another one.
    """
    for most in sorted({min(each, width) for each in _WIDTHS if _width(each) <= _width(width)}):
        for rows in _ROWS:
            if rows <= _rows(max_requests):
                allocate(torch.full((min(rows, max_requests), most), 0.5, device=device), 1)


def takes(max_requests: int, width: int, calibration: torch.Tensor) -> bool:
    """Whether the kernel serves batches of up to ``max_requests`` of up to ``width`` drafts on that device."""
    return 0 < max_requests <= MOST_REQUESTS and 0 < width <= MOST_DRAFTS and runs_on(calibration)


def _takes(tensor: torch.Tensor, *shape: int) -> bool:
    return runs_on(tensor) and tensor.dtype == torch.float32 and tensor.shape == shape


def _rows(requests: int) -> int:
    return next(rows for rows in _ROWS if requests <= rows)


def _width(most: int) -> int:
    return next(width for width in _WIDTHS if most <= width)


def _by_row(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


@triton.jit
def _above(keys, bound, WIDTH: tl.constexpr):
    """[rows] int32: how many of the WIDTH ``keys`` of each row exceed ``bound``."""
    count = (keys[0] > bound).to(tl.int32)
    for position in tl.static_range(1, WIDTH):
        count += (keys[position] > bound).to(tl.int32)
    return count


@triton.jit
def _reached(keys, count, highest, WIDTH: tl.constexpr):
    """A number that exactly ``count`` of the ``keys`` reach; if there is none because of equal keys, the largest that
    at least so many reach; 0 if all together are fewer. Negative keys do not count."""
    found = 0
    reach = tl.sum(_above(keys, -1, WIDTH))
    bit = highest
    while (bit > 0) & (reach > count):
        trial = found + bit
        tried = tl.sum(_above(keys, trial - 1, WIDTH))
        found = tl.where(tried >= count, trial, found)
        reach = tl.where(tried >= count, tried, reach)
        bit >>= 1
    return found


@triton.jit(
    do_not_specialize=(
        *("confidence", "weights", "calibration", "out", "requests", "most", "budget", "first", "row_stride"),
        *("calibration_stride", "weighted"),
    )
)
def _allocate(
    confidence,
    weights,
    calibration,
    out,
    requests,
    most,
    budget,
    first,
    row_stride,
    calibration_stride,
    weighted,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program: a row of its block is a request, and its keys are a tuple of columns, so that the product over
    positions and the sum of a row stay within a thread. A ``calibration_stride`` below 0: without calibration."""
    row = tl.arange(0, ROWS)
    here = row < requests
    survival = tl.load(weights + row, mask=here & (weighted > 0), other=1.0)
    survival = tl.where((survival > 0) & (survival < float("inf")), survival, 1.0)
    keys = ()
    for position in tl.static_range(WIDTH):
        mask = here & (position < most)
        chance = tl.load(confidence + row * row_stride + position, mask=mask, other=0.0)
        inside = (chance >= 0) & (chance <= 1)
        if calibration_stride >= 0:
            offset = tl.load(calibration + position, mask=position < most, other=0.0)
            slope = tl.load(calibration + calibration_stride + position, mask=position < most, other=0.0)
            odds = tl.log(tl.div_rn(chance, 1 - chance))
            odds = tl.minimum(tl.maximum(odds, -_LIMIT), _LIMIT)
            # Division is rounded correctly: a factor above 1 would lift a survival above the one before it.
            chance = tl.div_rn(1.0, 1.0 + tl.exp(-(offset + slope * odds)))
        # -0.0, whose bits are not those of 0, becomes 0, too.
        survival *= tl.where(inside & (chance > 0), chance, 0.0)
        key = tl.where(position < first, _INFINITY, survival.to(tl.int32, bitcast=True))
        keys += (tl.where(mask, key, -1),)
    least = _reached(keys, budget, _HIGHEST, WIDTH)
    share = _above(keys, least, WIDTH)
    # Those that are equal to it are taken by position, then by row.
    order = ()
    for position in tl.static_range(WIDTH):
        place = ROWS * WIDTH - 1 - (position * ROWS + row)
        order += (tl.where(keys[position] == least, place, -1),)
    last = _reached(order, budget - tl.sum(share), ROWS * WIDTH // 2, WIDTH)
    tl.store(out + row, 1 + share + _above(order, last - 1, WIDTH), mask=here)
