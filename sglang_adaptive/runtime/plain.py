"""A step without a draft: one token a request, verified and sampled, the draft's KV kept current.

What the host's decode step does around a draft falls away: no draft forward, no packing of a block, no rejection
sampling over K+1 rows. The target still runs as a verification, one token wide: its hidden states must reach the
draft's KV cache, without which the next draft would not know what was said meanwhile. Where the step runs as a CUDA
graph, that is part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dspark_components.dspark_draft import make_next_draft_input
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

from sglang_adaptive.runtime.penalties import Penalties


def can_run(worker: Any, batch: Any) -> bool:
    """Whether nothing in the batch needs what only the host's full step does."""
    special = batch.has_grammar or batch.return_logprob or worker._need_mamba_verify_commit
    return not special and batch.spec_info is not None and worker.planner.serves(1)


def forward(worker: Any, batch: Any, on_publish: Callable[..., None]) -> GenerationBatchResult:
    """Run the step for the R requests of ``batch``; commits exactly one token for each."""
    planner, runner, width = worker.planner, worker.model_runner, worker.verify_num_draft_tokens
    draft_input, prefix_lens = batch.spec_info, batch.seq_lens
    requests = len(prefix_lens)
    seq_lens_cpu, seq_lens_sum = batch.seq_lens_cpu, batch.seq_lens_sum
    plan = runner.kv_index_translator.plan_uniform_extend(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=prefix_lens,
        seq_lens_cpu=seq_lens_cpu if seq_lens_cpu is not None else draft_input.nxt_kv_lens_cpu,
        width=1,
    )
    anchors = draft_input.bonus_tokens.view(-1).to(torch.int64)
    penalties = Penalties.of(batch).begin_decode(batch, anchors)
    batch.out_cache_loc = plan.write_virtual
    if seq_lens_cpu is not None:
        batch.seq_lens_cpu = seq_lens_cpu + 1
        batch.seq_lens_sum = int(seq_lens_sum) + requests
    elif draft_input.nxt_kv_lens_cpu is not None:
        # An upper bound, without which eager attention sizes its tables for the whole context.
        batch.seq_lens_cpu, batch.seq_lens_sum = draft_input.nxt_kv_lens_cpu, int(draft_input.nxt_kv_lens_sum)
    verify_input = DFlashVerifyInput(
        draft_token=anchors,
        positions=prefix_lens.to(torch.int64),
        draft_token_num=1,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        live_seq_lens_cpu=seq_lens_cpu,
        kv_loc_plan=plan,
    )
    with planner.verify_anchors(requests):
        forward_batch, _ = verify_input.prepare_for_verify(batch, worker.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = seq_lens_cpu, seq_lens_sum
        result = worker.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
    logits_output = result.logits_output
    logits_output.next_token_logits = logits_output.next_token_logits[:requests]
    if penalties is not None:
        penalties.apply(logits_output.next_token_logits, width=1)
    # As in a decode step of the host: the token before the one sampled counts, and gives seeds their position.
    new_seq_lens = prefix_lens + 1
    forward_batch.seq_lens = new_seq_lens
    tokens = runner.sample(logits_output, forward_batch).to(torch.int64)
    worker._tp_sync.sync(SpecTpSyncSite.DSPARK_TARGET, tokens)

    on_publish(new_seq_lens)
    if not (result.can_run_cuda_graph and planner.widths.has_tail(1)):
        worker._kv_injector.inject_target_hidden(
            target_hidden=logits_output.hidden_states[:requests],
            cache_loc=worker._kv_injector.ids_for(plan).view(-1),
            positions=prefix_lens,
        )
    logits_output.hidden_states = None
    if penalties is not None:
        penalties.commit(tokens.unsqueeze(1), planner.ones(requests))
    committed = planner.ones_on_cpu(requests)
    return GenerationBatchResult(
        logits_output=logits_output,
        next_token_ids=tokens,
        accept_lens=committed,
        block_accept_lens=committed,
        cap_lens=committed,
        can_run_cuda_graph=result.can_run_cuda_graph,
        next_draft_input=make_next_draft_input(bonus_tokens=tokens, new_seq_lens=new_seq_lens),
        speculative_num_draft_tokens=width,
        speculative_output_stride=1,
        new_seq_lens=new_seq_lens,
    )


def draft_kv_in_graph(worker: Any) -> Callable[..., None] | None:
    """A hook for the end of the graphs of one token a request, which writes the draft's KV of that token.

    It is what ``inject_target_hidden`` does, which takes the CPU as long as a dozen launches. None where the draft's
    pool names its slots differently from the target's, or is written in another way (a ring of a sliding window).
    """
    runner, draft_runner, model = worker.model_runner, worker.draft_model_runner, worker.draft_model
    pool = draft_runner.token_to_kv_pool
    spaces = [of.kv_index_translator.space(IdSpaceKind.FULL) for of in (runner, draft_runner)]
    if hasattr(pool, "set_swa_key_buffer_radix_fused_norm_rope") or None in spaces:
        return None
    if spaces[0].key != spaces[1].key:
        return None

    def write(_graphs: Any, output: Any, forward_batch: Any, num_tokens: int) -> None:
        with torch.inference_mode():
            model.write_target_hidden_kv(
                target_hidden=output.hidden_states[:num_tokens],
                pool=pool,
                positions=forward_batch.positions.to(torch.int64),
                cache_loc=forward_batch.out_cache_loc.to(torch.int64),
            )

    return write
