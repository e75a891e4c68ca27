"""Verify lengths that differ, under the attention backend triton; applied under the option ``triton_ragged`` only.

The rows of a verification are its kernel's extension: their keys and values come packed beside the queries, and the
cache is read before each request's first row. So all that depends on the lengths is where each request's rows begin.
"""

from __future__ import annotations

from typing import Any

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.options import variable
from sglang_adaptive.patches.registry import Patch

_BACKEND = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
_KERNEL = "sglang.kernels.ops.attention.extend_attention"


def _admit(result: None, backend: Any, *args: Any, **kwargs: Any) -> None:
    """After the constructor: packed rows may run in graphs. Raises AdaptiveError where its kernels want equal rows.

    What the arguments tell is decided before weights load (``guard.backends.unable_triton``), by verifying equally.
    """
    if backend.is_draft_runner:
        return
    reasons = {
        "the model has sliding windows": (backend.sliding_window_size or 0) > 0,
        "inference is deterministic": backend.enable_deterministic,
        "attention is latent": backend.use_mla,
        "decoding is context-parallel": backend.dcp_size > 1,
        "this GPU has a verification kernel of its own": backend.use_verify_splitkv or backend.use_verify_shared_kv,
    }
    reason = next((text for text, unable in reasons.items() if unable), None)
    if reason is not None:
        raise AdaptiveError(
            f"The attention backend triton cannot verify a different number per request here, because {reason}: unset "
            f"{variable('triton_ragged')}."
        )
    backend.supports_ragged_verify_graph = True


def _begin_rows(result: None, backend: Any, forward_batch: Any) -> None:
    """Without a graph: R + 1 begins, int32, of the batch as it is."""
    layout = _layout(forward_batch.spec_info)
    if layout is not None and forward_batch.forward_mode.is_target_verify():
        backend.forward_metadata.qo_indptr = layout.qo_indptr_device


def _stage_rows(
    result: Any, backend: Any, plan: Any, bs: int, seq_lens: Any, spec_info: Any, req_pool_indices: Any
) -> None:
    """For a graph, at capture and before each replay: into the buffer that it reads, of all ``bs`` slots that it has.

    Its padding is spread over the slots without a request, or follows the last request's rows where there is none,
    which do not see what comes after them.
    """
    layout = _layout(spec_info)
    if layout is not None:
        backend.qo_indptr[: bs + 1].copy_(layout.padded_to_bucket(padded_bs=bs).qo_indptr_device)


def _layout(spec_info: Any) -> Any:
    return getattr(spec_info, "ragged_verify_layout", None)


PATCHES = [
    Patch(
        target=f"{_BACKEND}.__init__",
        hook=_admit,
        kind="after",
        why="The decode runner asks the backend whether graphs with packed rows may run on it, and triton says no.",
        depends=(
            f"{_BACKEND}.forward_extend",
            f"{_BACKEND}._forward_extend_kernel",
            f"{_KERNEL}.extend_attention_fwd",
            f"{_KERNEL}._fwd_kernel",
            "sglang.srt.speculative.dflash_utils.resolve_dflash_verify_mask_policy",
        ),
        remove_when="the host's triton backend verifies ragged layouts",
    ),
    Patch(
        target=f"{_BACKEND}.init_forward_metadata",
        hook=_begin_rows,
        kind="after",
        why="It lays out equally many rows for every request, whatever the batch's layout says.",
        depends=(f"{_BACKEND}._target_verify_num_tokens_per_req", f"{_BACKEND}._fill_kv_indptr_and_indices"),
        remove_when="the host's triton backend verifies ragged layouts",
    ),
    Patch(
        target=f"{_BACKEND}._update_target_verify_buffers",
        hook=_stage_rows,
        kind="after",
        why="It lays out equally many rows for every slot of a graph, whatever the batch's layout says.",
        depends=(
            f"{_BACKEND}._apply_cuda_graph_metadata",
            f"{_BACKEND}._build_cuda_graph_forward_metadata",
            f"{_BACKEND}.init_cuda_graph_state",
            "sglang.srt.speculative.ragged_verify.RaggedVerifyLayout.padded_to_bucket",
        ),
        remove_when="the host's triton backend verifies ragged layouts",
    ),
]
