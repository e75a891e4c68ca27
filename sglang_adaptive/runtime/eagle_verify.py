"""Ragged verification inside the host's EAGLE step.

The step keeps its strided form, K + 1 rows a request: what it samples from, accepts and extends the draft with. Only
the target's forward is packed: its rows are the first ``verify_lens`` tokens of each request, and its logits and hidden
states are put back where the step expects them. The rest of each chain is cut off, so that nothing beyond is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_uniform_func
from sglang.kernels.ops.speculative.dspark.dspark_verify_window import BuildRaggedVerifyWindow, ScatterCompactToStrided
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.eagle_worker_common import run_eagle_verify


def cut(verify_input: Any, verify_lens: torch.Tensor) -> None:
    """End each request's chain after its first ``verify_lens`` [R] tokens.

    Where drafts are sampled, the draft distributions beyond are zero: then the host's rejection sampling rejects the
    first draft that was not verified, and what it samples instead has exactly the target's distribution.
    """
    last = (verify_lens - 1).unsqueeze(1)
    place = torch.arange(verify_input.draft_token_num, device=verify_lens.device)
    verify_input.retrieve_next_token = torch.where(place < last, verify_input.retrieve_next_token, -1)
    if verify_input.draft_probs is not None:
        verify_input.draft_probs.masked_fill_((place[:-1] >= last).unsqueeze(2), 0.0)


def run(worker: Any, batch: Any, layout: Any, grammar_barrier: Any = None) -> Any:
    """The host's verification of ``batch.spec_info``, of which the target sees the rows of ``layout`` only."""
    verify_input, width = batch.spec_info, batch.spec_info.draft_token_num
    verify_input.ragged_verify_layout = layout
    return run_eagle_verify(
        batch,
        target_worker=_PackedTarget(worker.target_worker, layout, width),
        req_to_token_pool=worker.req_to_token_pool,
        token_to_kv_pool_allocator=worker.token_to_kv_pool_allocator,
        plan_stream=None,
        plan_stream_ctx=nullcontext(),
        topk=1,
        num_draft_tokens=width,
        device=worker.device,
        metadata_ready_pre_pad=False,
        finalize_tree_path=False,
        grammar_barrier=grammar_barrier,
    )


class _PackedTarget:
    """The target worker, whose verification of packed rows looks strided from outside."""

    def __init__(self, target_worker: Any, layout: Any, width: int) -> None:
        self._target_worker, self._layout, self._width = target_worker, layout, width

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target_worker, name)

    def forward_batch_generation(self, **kwargs: Any) -> Any:
        # The metadata were laid out when the batch was packed.
        result = self._target_worker.forward_batch_generation(skip_attn_backend_init=True, **kwargs)
        output = result.logits_output
        output.next_token_logits = self._strided(output.next_token_logits)
        output.hidden_states = self._strided(output.hidden_states)
        return result

    def _strided(self, packed: torch.Tensor) -> torch.Tensor:
        rows = self._layout.bs * self._width
        if self._layout.total_verify_tokens == rows:
            return packed[:rows]
        return ScatterCompactToStrided.execute(
            compact=packed, layout=self._layout, fill_value=0.0, verify_num_draft_tokens=self._width
        )


def kv_window(batch: Any, req_to_token_pool: Any, width: int) -> torch.Tensor:
    """[R * width] KV locations of the next ``width`` tokens of each request."""
    return assign_extend_cache_locs_uniform_func(
        req_pool_indices=batch.req_pool_indices,
        req_to_token=req_to_token_pool.req_to_token,
        start_offset=batch.seq_lens,
        batch_size=len(batch.seq_lens),
        draft_token_num=width,
        device=batch.device,
    )


def prepare(
    original: Callable[..., Any], verify_input: Any, req_to_token_pool: Any, batch: Any, target_worker: Any
) -> tuple[Any, bool]:
    """Around the host's ``eagle_prepare_for_verify``: the forward batch of a packed verification, where one is due.

    Leaves ``batch`` as the host's does: with the strided window's KV locations, which the draft-extend writes again.
    """
    layout = verify_input.ragged_verify_layout
    if layout is None:
        return original(verify_input, req_to_token_pool, batch, target_worker)
    requests, width = verify_input.retrieve_index.shape
    runner = target_worker.model_runner
    tokens = verify_input.draft_token.view(requests, width)
    window = BuildRaggedVerifyWindow.execute(
        batch=batch,
        layout=layout,
        # The kernel strides both by the number of drafts.
        draft_block_ids=tokens[:, : max(width - 1, 1)],
        draft_tokens=tokens[:, 1:] if width > 1 else tokens,
        bs=requests,
        device=batch.device,
        verify_num_draft_tokens=width,
        model_runner=runner,
    )
    strided = verify_input.prepared_out_cache_loc
    if strided is None:
        strided = kv_window(batch, req_to_token_pool, width)
    seq_lens_cpu, seq_lens_sum = batch.seq_lens_cpu, batch.seq_lens_sum
    if seq_lens_cpu is not None:
        lens = layout.verify_lens.tolist() if layout.verify_lens_cpu is None else layout.verify_lens_cpu
        batch.seq_lens_cpu = seq_lens_cpu + torch.tensor(lens, dtype=seq_lens_cpu.dtype)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    batch.out_cache_loc = window.verify_cache_loc
    forward_batch, in_graph = DFlashVerifyInput(
        draft_token=window.verify_ids,
        positions=window.positions,
        # Of the captured graphs, also where a step has no drafts.
        draft_token_num=get_spec().speculative_num_draft_tokens,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        ragged_verify_layout=layout,
        live_seq_lens_cpu=seq_lens_cpu,
        kv_loc_plan=verify_input.kv_loc_plan,
        kv_loc_cols=None if verify_input.kv_loc_plan is None else window.window_index,
    ).prepare_for_verify(batch, target_worker)
    batch.seq_lens_cpu, batch.seq_lens_sum = seq_lens_cpu, seq_lens_sum
    batch.out_cache_loc, batch.spec_info = strided, verify_input
    return forward_batch, in_graph
