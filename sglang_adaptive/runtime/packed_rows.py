"""Kernels for packed verification rows: each makes in one launch what the host makes in several.

At small batches a decode step lasts as long as the CPU takes to launch it, so few launches and few arguments count, not
the time on the GPU. No argument is specialised on its value or alignment: a kernel is compiled once for the dtypes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Under Triton's interpreter, which tests use, the kernels run on the CPU.
INTERPRETED = bool(triton.knobs.runtime.interpret)

_ROWS = 128
_SLOTS = 1024
# Rows of one allocation begin at multiples of so many elements.
_ALIGNED = 32
_NO_CAP = 2**31 - 1


def runs_on(tensor: torch.Tensor) -> bool:
    """Whether the kernels can take this tensor."""
    return tensor.is_cuda or INTERPRETED


class Window(NamedTuple):
    """[N] int64 each: N packed rows, of which those behind the last request's are padding."""

    positions: torch.Tensor
    cache_loc: torch.Tensor
    ids: torch.Tensor
    # Where the row lies in [R, width]; -1 in the padding, which is 0 in the others.
    index: torch.Tensor


class Lengths(NamedTuple):
    """int32: lengths [S] of each slot's rows, [S + 1] where they begin and the last ends, [S] where they begin."""

    lens: torch.Tensor
    begins: torch.Tensor
    starts: torch.Tensor


def window(
    *,
    begins: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    anchors: torch.Tensor,
    drafts: torch.Tensor,
    rows: int,
    width: int,
) -> Window:
    """The packed rows of R requests.

    Args:
        begins: [R + 1] where each request's rows begin and the last one's end; rows beyond ``rows`` are left out.
        seq_lens: [R] tokens before each request's first row.
        req_pool_indices: [>= R] each request's row in ``req_to_token``.
        req_to_token: [pool, context] the KV location of each token.
        anchors: [R, >= 1] of which the first column is each request's first row.
        drafts: [R, >= longest request - 1] its other rows.
        rows: N.
        width: the stride of ``Window.index``.

    All integers of any dtype.
    """
    requests = begins.shape[0] - 1
    out = torch.empty((4, _aligned(rows)), dtype=torch.int64, device=begins.device)
    _window[(requests + -(-rows // _ROWS),)](
        begins.contiguous(),
        seq_lens.contiguous(),
        req_pool_indices.contiguous(),
        _rows_of(req_to_token),
        anchors,
        _rows_of(drafts),
        out,
        requests,
        rows,
        width,
        req_to_token.stride(0),
        anchors.stride(0),
        drafts.stride(0),
        out.stride(0),
        _ROWS,
    )
    return Window(*(out if out.shape[1] == rows else out[:, :rows]).unbind(0))


class Padding:
    """The lengths [R] of requests padded to ``slots`` slots so that they cover ``rows`` rows.

    The rows that are left over are spread over the slots without a request, the first ones longer by one; where there
    is none, they are the last request's. Where ``cap`` is given, the lengths limited by it are made beside them.
    """

    def __init__(self, verify_lens: torch.Tensor, rows: int, slots: int, cap: int | None) -> None:
        self.slots, self.cap, self._stride = slots, cap, _aligned(slots + 1)
        limit = _NO_CAP if cap is None else cap
        self._out = torch.empty(6 * self._stride, dtype=torch.int32, device=verify_lens.device)
        arguments = verify_lens.contiguous(), self._out, verify_lens.shape[0], slots, rows, limit, self._stride
        _padding[(1,)](*arguments, _SLOTS)

    def lengths(self, capped: bool) -> Lengths:
        """Views of what was made, with the limit or without it."""
        at = 3 * self._stride if capped else 0
        begins, starts, slots = at + self._stride, at + 2 * self._stride, self.slots
        return Lengths(
            self._out[at : at + slots], self._out[begins : begins + slots + 1], self._out[starts : starts + slots]
        )


def kv_lengths(seq_lens: torch.Tensor, verify_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32: [R] tokens that each request's rows attend to, and [R + 1] where they begin."""
    requests = seq_lens.shape[0]
    stride = _aligned(requests)
    out = torch.empty(stride + requests + 1, dtype=torch.int32, device=seq_lens.device)
    _kv_lengths[(1,)](seq_lens.contiguous(), verify_lens.contiguous(), out, requests, stride, _SLOTS)
    return out[:requests], out[stride:]


def compile_ahead(device: torch.device | str) -> None:
    """Compile for the dtypes that the host serves with, so that no step waits for it."""
    ones = torch.ones((2, 2), dtype=torch.int64, device=device)
    lens = torch.ones(2, dtype=torch.int32, device=device)
    begins = Padding(lens, rows=2, slots=2, cap=None).lengths(capped=False).begins
    window(
        begins=begins,
        seq_lens=ones[0] - 1,
        req_pool_indices=ones[0] - 1,
        req_to_token=torch.zeros((1, 1), dtype=torch.int32, device=device),
        anchors=ones,
        drafts=ones,
        rows=2,
        width=2,
    )
    kv_lengths(ones[0], lens)


def _aligned(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED


def _rows_of(matrix: torch.Tensor) -> torch.Tensor:
    if matrix.stride(1) != 1 and matrix.shape[1] > 1:
        raise ValueError(f"rows with a stride of {matrix.stride(1)} elements: make them contiguous.")
    return matrix


@triton.jit(
    do_not_specialize=(
        *("begins", "seq_lens", "req_pool_indices", "req_to_token", "anchors", "drafts", "out", "requests", "rows"),
        *("width", "table_stride", "anchor_stride", "draft_stride", "out_stride"),
    )
)
def _window(
    begins,
    seq_lens,
    req_pool_indices,
    req_to_token,
    anchors,
    drafts,
    out,
    requests,
    rows,
    width,
    table_stride,
    anchor_stride,
    draft_stride,
    out_stride,
    BLOCK: tl.constexpr,
):
    """A program for each request, and behind them one for each block that may have padding."""
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if program < requests:
        begin = tl.load(begins + program).to(tl.int32)
        length = tl.minimum(tl.load(begins + program + 1).to(tl.int32), rows) - begin
        request = program.to(tl.int64)
        prefix = tl.load(seq_lens + program).to(tl.int64)
        locations = req_to_token + tl.load(req_pool_indices + program).to(tl.int64) * table_stride + prefix
        anchor = tl.load(anchors + request * anchor_stride).to(tl.int64)
        for first in range(0, length, BLOCK):
            place = first + lane
            mask = place < length
            location = tl.load(locations + place, mask=mask, other=0).to(tl.int64)
            draft = tl.load(drafts + request * draft_stride + place - 1, mask=mask & (place > 0), other=0)
            row = out + begin + place
            tl.store(row, prefix + place, mask=mask)
            tl.store(row + out_stride, location, mask=mask)
            tl.store(row + 2 * out_stride, tl.where(place == 0, anchor, draft.to(tl.int64)), mask=mask)
            tl.store(row + 3 * out_stride, request * width + place, mask=mask)
    else:
        place = tl.load(begins + requests).to(tl.int32) + (program - requests) * BLOCK + lane
        row, mask, zero = out + place, place < rows, tl.zeros([BLOCK], tl.int64)
        tl.store(row, zero, mask=mask)
        tl.store(row + out_stride, zero, mask=mask)
        tl.store(row + 2 * out_stride, zero, mask=mask)
        tl.store(row + 3 * out_stride, zero - 1, mask=mask)


@triton.jit(do_not_specialize=("verify_lens", "out", "requests", "slots", "rows", "cap", "stride"))
def _padding(verify_lens, out, requests, slots, rows, cap, stride, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    left = rows
    for first in range(0, requests, BLOCK):
        slot = first + lane
        left -= tl.sum(tl.load(verify_lens + slot, mask=slot < requests, other=0).to(tl.int32))
    spare = tl.maximum(slots - requests, 1)
    share = left // spare
    longer = left - share * spare
    begin = 0
    capped_begin = 0
    tl.store(out + stride, 0)
    tl.store(out + 4 * stride, 0)
    for first in range(0, slots, BLOCK):
        slot = first + lane
        mask = slot < slots
        length = tl.load(verify_lens + slot, mask=slot < requests, other=0).to(tl.int32)
        length += tl.where(slot >= requests, share + (slot - requests < longer).to(tl.int32), 0)
        length += tl.where((slots == requests) & (slot == requests - 1), left, 0)
        length = tl.where(mask, length, 0)
        capped = tl.minimum(length, cap)
        end = begin + tl.cumsum(length, 0)
        capped_end = capped_begin + tl.cumsum(capped, 0)
        tl.store(out + slot, length, mask=mask)
        tl.store(out + stride + 1 + slot, end, mask=mask)
        tl.store(out + 2 * stride + slot, end - length, mask=mask)
        tl.store(out + 3 * stride + slot, capped, mask=mask)
        tl.store(out + 4 * stride + 1 + slot, capped_end, mask=mask)
        tl.store(out + 5 * stride + slot, capped_end - capped, mask=mask)
        begin += tl.sum(length)
        capped_begin += tl.sum(capped)


@triton.jit(do_not_specialize=("seq_lens", "verify_lens", "out", "requests", "stride"))
def _kv_lengths(seq_lens, verify_lens, out, requests, stride, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    begin = 0
    tl.store(out + stride, 0)
    for first in range(0, requests, BLOCK):
        request = first + lane
        mask = request < requests
        length = tl.load(seq_lens + request, mask=mask, other=0) + tl.load(verify_lens + request, mask=mask, other=0)
        length = length.to(tl.int32)
        tl.store(out + request, length, mask=mask)
        tl.store(out + stride + 1 + request, begin + tl.cumsum(length, 0), mask=mask)
        begin += tl.sum(length)
