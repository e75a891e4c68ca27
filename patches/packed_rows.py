"""The layout of packed rows in few launches; applied on CUDA where verification is packed.

The host makes each of these out of up to fifteen kernels. Whatever ours do not take is handed over to the host's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from sglang_adaptive.patches.registry import Patch
from sglang_adaptive.runtime import packed_rows

_KERNELS = "sglang.kernels.ops.speculative"
_WINDOW = f"{_KERNELS}.dspark.dspark_verify_window"
_LAYOUT = "sglang.srt.speculative.ragged_verify"
_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"


def _window(original: Any, **arguments: Any) -> Any:
    """Around the window's maker; needs rows without gaps and as many of each as there are requests."""
    batch, layout, requests = arguments["batch"], arguments["layout"], arguments["bs"]
    drafts, anchors = arguments["draft_tokens"], arguments["draft_block_ids"]
    seq_lens, pool = batch.seq_lens, batch.req_pool_indices
    table = arguments["model_runner"].req_to_token_pool.req_to_token
    begins, width = layout.qo_indptr_device, arguments["verify_num_draft_tokens"]
    if (
        not all(map(packed_rows.runs_on, (begins, seq_lens, pool, table, drafts, anchors)))
        or not requests == layout.bs == seq_lens.shape[0] <= min(pool.shape[0], drafts.shape[0], anchors.shape[0])
        or not drafts.stride(1) == table.stride(1) == 1
        or drafts.shape[1] < width - 1
    ):
        return original(**arguments)
    made = packed_rows.window(
        begins=begins,
        seq_lens=seq_lens,
        req_pool_indices=pool,
        req_to_token=table,
        anchors=anchors,
        drafts=drafts,
        rows=layout.graph_num_tokens,
        width=width,
    )
    from sglang.kernels.ops.speculative.dspark.dspark_verify_window import RaggedVerifyWindow

    return RaggedVerifyWindow(
        positions=made.positions, verify_cache_loc=made.cache_loc, verify_ids=made.ids, window_index=made.index
    )


class _Padded(NamedTuple):
    """What a layout was padded to. Holding the layout keeps another one from taking its place in memory."""

    layout: Any
    stream: int
    padding: packed_rows.Padding

    def serves(self, layout: Any, stream: int, slots: int, cap: int | None) -> bool:
        padding = self.padding
        return (
            self.layout is layout
            and self.stream == stream
            and padding.slots == slots
            and (cap is None or padding.cap == cap)
        )


class _Staged(NamedTuple):
    layout: Any
    captured: Any


# Of the step that runs: a graph's layout and its attention's metadata are padded to the same slots.
_padded: _Padded | None = None
_staged: _Staged | None = None


def _lasts(layout: Any) -> bool:
    """Whether the layout's lengths stay what they are, and what is made of them now is there later.

    Those of captured graphs, which are written before each replay, come from lengths on the CPU.
    """
    if layout.verify_lens_cpu is not None:
        return False
    return not layout.verify_lens.is_cuda or not torch.cuda.is_current_stream_capturing()


def _pad(original: Any, layout: Any, *, padded_bs: int, cap: int | None = None) -> Any:
    """Around the padding of a layout. More requests than slots are the host's to refuse."""
    global _padded
    lens = layout.verify_lens
    if not packed_rows.runs_on(lens) or not 0 < layout.bs <= padded_bs:
        return original(layout, padded_bs=padded_bs, cap=cap)
    lasts, stream = _lasts(layout), _stream(lens)
    if lasts and _padded is not None and _padded.serves(layout, stream, padded_bs, cap):
        padding = _padded.padding
    else:
        padding = packed_rows.Padding(lens, layout.graph_num_tokens, padded_bs, cap)
        _padded = _Padded(layout, stream, padding) if lasts else None
    made = padding.lengths(capped=cap is not None)
    return type(layout)(
        verify_lens=made.lens,
        graph_num_tokens=layout.graph_num_tokens,
        extend_start_loc=made.starts,
        qo_indptr_device=made.begins,
        total_verify_tokens=None if cap is not None else layout.graph_num_tokens,
        cap=cap,
    )


def _stream(tensor: torch.Tensor) -> int:
    return triton.runtime.driver.active.get_current_stream(tensor.get_device()) if tensor.is_cuda else 0


def _stage(original: Any, runner: Any, layout: Any, graph_size_key: int) -> None:
    """Around the copy of a layout to where a graph reads it, which the host makes twice a step: when it prepares the
    forward pass, and when it runs it."""
    global _staged
    captured, lasts = runner._captured_ragged_layouts.get(graph_size_key), _lasts(layout)
    if lasts and _staged is not None and _staged.layout is layout and _staged.captured is captured:
        return
    original(runner, layout, graph_size_key)
    _staged = _Staged(layout, captured) if lasts else None


def _geometry(original: Any, *, seq_lens: torch.Tensor, layout: Any) -> Any:
    """Around what attention is told of a layout's lengths."""
    lens, begins = layout.verify_lens, layout.qo_indptr_device
    if (
        not packed_rows.runs_on(seq_lens)
        or not packed_rows.runs_on(lens)
        or seq_lens.shape != lens.shape
        or begins.dtype != torch.int32
    ):
        return original(seq_lens=seq_lens, layout=layout)
    from sglang.srt.speculative.ragged_verify import RaggedTargetVerifyGeometry

    kv_lens, kv_begins = packed_rows.kv_lengths(seq_lens, lens)
    return RaggedTargetVerifyGeometry(
        cache_seqlens_int32=kv_lens,
        cu_seqlens_q=begins,
        cu_seqlens_k=kv_begins,
        max_seq_len_q=None if layout.verify_lens_cpu is None else max(layout.verify_lens_cpu),
    )


PATCHES = [
    Patch(
        target=f"{_WINDOW}.build_ragged_verify_window_triton",
        hook=_window,
        kind="around",
        why="It launches fifteen kernels for what one can do, and on a slow CPU a step lasts as long as its launches.",
        depends=(
            f"{_WINDOW}.build_ragged_verify_window",
            f"{_WINDOW}.compact_row_index",
            f"{_WINDOW}.compact_verify_ids",
            f"{_WINDOW}.BuildRaggedVerifyWindow",
            f"{_KERNELS}.cache_locs.assign_extend_cache_locs_func",
            f"{_KERNELS}.cache_locs.assign_extend_cache_locs",
        ),
        remove_when="the host makes the window of packed rows in one launch",
    ),
    Patch(
        target=f"{_LAYOUT}.RaggedVerifyLayout.padded_to_bucket",
        hook=_pad,
        kind="around",
        why="It launches two kernels and a clamp, three times in a step: for each staging, and for the attention.",
        depends=(
            f"{_LAYOUT}.RaggedVerifyLayout._assemble_device",
            f"{_KERNELS}.ragged_verify_kernels.pad_verify_lens_to_bucket",
            f"{_KERNELS}.ragged_verify_kernels.build_qo_indptr",
            # Which layouts are written in place.
            f"{_RUNNER}._capture_ragged_verify_layout",
            f"{_LAYOUT}.RaggedVerifyLayout.from_verify_lens",
        ),
        remove_when="the host pads a layout in one launch",
    ),
    Patch(
        target=f"{_RUNNER}._stage_ragged_verify_layout",
        hook=_stage,
        kind="around",
        why="It copies the layout of one step to the same place twice.",
        depends=(f"{_RUNNER}.load_batch", f"{_RUNNER}._capture_ragged_verify_layout", f"{_RUNNER}.execute"),
        remove_when="the host stages a layout once in a step",
    ),
    Patch(
        target=f"{_LAYOUT}.build_ragged_target_verify_geometry",
        hook=_geometry,
        kind="around",
        why="It launches five kernels for lengths and their sums.",
        remove_when="the host makes the geometry of packed rows in one launch",
    ),
]
