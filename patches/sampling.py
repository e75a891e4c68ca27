"""Sampling parameters that the host's DSpark verification drops: penalties, ``min_new_tokens``, ``min_p``, seeds."""

from __future__ import annotations

from typing import Any

import torch

from sglang_adaptive.patches.registry import Edit, Patch
from sglang_adaptive.runtime import seeds
from sglang_adaptive.runtime.penalties import Penalties

_DSPARK = "sglang.srt.speculative.dspark_components"
_EXECUTOR = f"{_DSPARK}.dspark_verify.TargetVerifyExecutor"


def _is_noop(original: Any, sampling_info: Any) -> bool:
    if sampling_info is not None and (
        sampling_info.acc_additive_penalties is not None or sampling_info.need_min_p_sampling
    ):
        return False
    return bool(original(sampling_info))


def _begin_compact(executor: Any, **kwargs: Any) -> None:
    batch = kwargs["batch"]
    step = Penalties.of(batch).begin_decode(batch, kwargs["draft_block_ids"][:, 0], kwargs["draft_tokens"])
    if step is not None:
        batch.sampling_info.adaptive_penalties = step


def _begin_uniform(executor: Any, **kwargs: Any) -> None:
    batch, ids = kwargs["batch"], kwargs["verify_ids_2d"]
    step = Penalties.of(batch).begin_decode(batch, ids[:, 0], ids[:, 1:])
    if step is not None:
        batch.sampling_info.adaptive_penalties = step


def _apply(*, next_token_logits: torch.Tensor, sampling_info: Any, draft_token_num: int) -> None:
    step = getattr(sampling_info, "adaptive_penalties", None)
    if step is not None:
        step.apply(next_token_logits, draft_token_num)


def _accept(original: Any, executor: Any, *, sampling_info: Any, **kwargs: Any) -> Any:
    step = getattr(sampling_info, "adaptive_penalties", None)
    if seeds.apply(sampling_info) and executor._simulated_correct_len is None:
        logits, width = kwargs["target_logits"], executor.verify_num_draft_tokens
        tokens = seeds.drawn(logits, sampling_info, kwargs["prefix_lens"], width)
        kwargs["target_logits"], sampling_info = seeds.certain(logits, tokens), None
    accept = original(executor, sampling_info=sampling_info, **kwargs)
    if step is not None:
        step.commit(accept.out_tokens, accept.commit_lens)
    return accept


def prefill(original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around a worker's prefill or mixed step: penalties of the requests in it that have output already."""
    step = Penalties.of(batch).begin_prefill(batch)
    decoding = len(batch.decoding_reqs or ())
    result = original(worker, batch, *args, **kwargs)
    if step is not None:
        tokens = result.next_token_ids.to(torch.int64)
        lengths = torch.zeros_like(tokens)
        lengths[-decoding:] = 1
        step.commit(tokens.unsqueeze(1), lengths)
    return result


def _min_p(probs: torch.Tensor, *, sampling_info: Any, draft_token_num: int, **kwargs: Any) -> torch.Tensor:
    """Drop from ``probs`` [B, width, V] what is less likely than ``min_p`` of the likeliest, as the sampler does."""
    if not sampling_info.need_min_p_sampling:
        return probs
    floor = probs.amax(dim=-1, keepdim=True) * sampling_info.min_ps.view(-1, 1, 1)
    kept = torch.where(probs < floor, 0.0, probs)
    return kept / kept.sum(dim=-1, keepdim=True)


PATCHES = [
    Patch(
        target=f"{_DSPARK}.dspark_verify.verify_logits_adjustments_are_noop",
        why="It asks for penalties under a name that no object has, so that accepting inside a CUDA graph, which knows "
        "neither penalties nor min_p, is taken for exact.",
        remove_when="the host asks for acc_additive_penalties, acc_scaling_penalties and min_p.",
        depends=("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.update_penalties",),
        hook=_is_noop,
        kind="around",
    ),
    Patch(
        target=f"{_EXECUTOR}.run_compact",
        why="The penalties of a verified position depend on the drafts before it, which are known from here on.",
        remove_when="the host counts output tokens in DSpark steps, and drafts for the positions behind them.",
        depends=(
            "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens",
            "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.copy_for_forward",
        ),
        hook=_begin_compact,
        kind="before",
    ),
    Patch(
        target=f"{_EXECUTOR}.run_non_compact",
        why="The same for uniform verification.",
        remove_when="the host does what makes the patch of run_compact unnecessary.",
        hook=_begin_uniform,
        kind="before",
    ),
    Patch(
        target="sglang.srt.speculative.dflash_utils.apply_dflash_verify_logits_adjustments",
        why="It applies no penalty under DSpark; ours come first, as in the host's sampler, then biases and grammars.",
        remove_when="the host does what makes the patch of run_compact unnecessary.",
        hook=_apply,
        kind="before",
    ),
    Patch(
        target=f"{_EXECUTOR}.accept_and_finalize",
        why="What was accepted is counted on the device: the scheduler learns of it a step late. Seeds are dropped: "
        "where they are honoured, greedy acceptance compares drafts with what the target draws by them.",
        remove_when="the host does what makes the patch of run_compact unnecessary, and draws by seeds.",
        depends=(f"{_DSPARK}.dspark_verify.accept_draft_tokens", f"{_DSPARK}.dspark_verify.build_accept_outs"),
        hook=_accept,
        kind="around",
    ),
    Patch(
        target=f"{_DSPARK}.dspark_worker_v2.DSparkWorkerV2._forward_prefill",
        why="A retracted request, or one that decodes in a mixed step, has output that the host's penalties forgot.",
        remove_when="the host rebuilds its counts after a retraction and keeps them in DSpark steps.",
        hook=prefill,
        kind="around",
    ),
    Patch(
        target="sglang.srt.speculative.dflash_utils.build_speculative_verify_target_probs",
        why="It knows top-k and top-p only, so min_p is dropped.",
        remove_when="the host applies min_p in its speculative target probabilities.",
        hook=_min_p,
        kind="after",
    ),
    Patch(
        target="sglang.kernels.ops.speculative.dspark.dspark_accept._accept_sampling_core",
        why="Without top-k and top-p it takes a softmax of its own, which min_p would miss.",
        remove_when="the host applies min_p in its speculative target probabilities.",
        kind="edit",
        edits=(
            Edit(
                old="if not sampling_info.need_top_k_sampling and not sampling_info.need_top_p_sampling:",
                new="if not (sampling_info.need_top_k_sampling or sampling_info.need_top_p_sampling\n"
                "            or sampling_info.need_min_p_sampling):",
            ),
        ),
    ),
]
