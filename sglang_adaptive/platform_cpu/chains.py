"""Torch twins of the host's EAGLE kernels, for chains of drafts: trees are refused.

A chain of ``slots`` tokens is the root (the token committed last) and ``slots - 1`` drafts; token ``j`` of row ``r``
has index ``r * slots + j`` in everything packed.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.platform_cpu.kernels import draw, ranges, write_chain


def refuse_tree(topk: int) -> None:
    """Raise AdaptiveError where more than one draft is proposed per step."""
    if topk != 1:
        raise AdaptiveError(
            "The CPU platform drafts chains, not trees: add --speculative-eagle-topk 1 with --speculative-num-steps N "
            "and --speculative-num-draft-tokens N+1."
        )


def assign_draft_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Write the KV slots of the ``topk * num_cols`` positions from ``seq_lens`` on, packed request by request."""
    rows, places = ranges(seq_lens, seq_lens + topk * num_cols)
    out_cache_loc.copy_(req_to_token[req_pool_indices[rows], places])
    if positions is not None:
        positions.copy_(seq_lens.repeat_interleave(topk))
    if mrope is not None:
        mrope.copy_(seq_lens.repeat_interleave(topk).expand_as(mrope))


def build_chain(
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    topk: int,
    num_verify_tokens: int,
    full_mask: bool,
) -> None:
    """Write the verify layout of a chain: each token's successor is the next one, and it sees what is before it.

    Args:
        seq_lens: [rows], committed tokens.
        tree_mask: bool, at least rows * slots * slots, written: causal blocks; ``full_mask`` (a mask over the committed
            tokens too) is refused, since the attention of this platform reads none.
        positions: int64 [rows * slots], written.
        retrieve_index, retrieve_next_token: int64 [rows, slots], written; siblings stay -1 as the host fills them.
    """
    refuse_tree(topk)
    if full_mask:
        raise AdaptiveError("The CPU platform verifies with its own attention backend: drop --attention-backend.")
    rows, slots = seq_lens.numel(), num_verify_tokens
    steps = torch.arange(slots)
    causal = steps <= steps.unsqueeze(1)
    tree_mask[: rows * slots * slots].view(rows, slots, slots).copy_(causal.to(tree_mask.dtype).expand(rows, -1, -1))
    positions.view(rows, slots).copy_(seq_lens.unsqueeze(1) + steps)
    retrieve_index.copy_(torch.arange(rows * slots).view(rows, slots))
    retrieve_next_token[:, :-1] = steps[1:]
    retrieve_next_token[:, -1] = -1


def verify_chain_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int,
) -> None:
    """Accept drafts while they are what the target predicts; written as :func:`write_chain` says.

    Args:
        retrieve_next_token: int64 [rows, slots], -1 where a row's chain ends; later drafts are never accepted.
        candidates: int64 [rows, slots], root and drafts; target_predict: int64 [rows, slots], the target's token after
            each of them.
    """
    refuse_tree(topk)
    drafts = candidates[:, 1:].to(torch.int64)
    count = torch.cumprod((drafts == target_predict[:, :-1]).to(torch.int64), dim=1).sum(1)
    count = torch.minimum(count, _drafts_in_chain(retrieve_next_token))
    final = target_predict[torch.arange(count.numel()), count]
    write_chain(predicts, accept_index, accept_token_num, retrieve_index, drafts, count, final)


def sample_chain_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    **unread: Any,
) -> None:
    """Accept each draft with the target's own probability; after a rejection sample from what else it would say.

    That is rejection sampling (Leviathan et al. 2023) with a draft distribution that has all its mass on the draft, so
    the output has the target's distribution. Thresholds below 1 accept more than that, as in the host's kernel.

    Args:
        retrive_next_token: int64 [rows, slots], -1 where a row's chain ends; later drafts are never accepted.
        target_probs: [rows, slots, vocab]; the others as in :func:`kernels.chain_speculative_sampling`.
    """
    rows, slots = candidates.shape
    drafts = candidates[:, 1:].to(torch.int64)
    p = target_probs[:, :-1].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    accepted = (uniform_samples[:, : slots - 1] * max(threshold_acc, 1e-9) < p) | (p >= threshold_single)
    verified = _drafts_in_chain(retrive_next_token)
    count = torch.minimum(torch.cumprod(accepted.to(torch.int64), dim=1).sum(1), verified)
    rest = target_probs[torch.arange(rows), count].clone()
    rejected = (count < verified).nonzero().squeeze(1)
    rest[rejected, drafts[rejected, count[rejected]]] = 0.0
    final = draw(rest, uniform_samples_for_final_sampling)
    write_chain(predicts, accept_index, accept_token_num, retrive_index, drafts, count, final)


def _drafts_in_chain(next_token: torch.Tensor) -> torch.Tensor:
    """Drafts [rows] before the first -1 of ``next_token`` [rows, slots]."""
    return torch.cumprod((next_token >= 0).to(torch.int64), dim=1).sum(1)


def fill_bonus_tokens(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Write the last committed token of each row: ``accept_tokens`` [rows, accept_stride], ``accept_lens`` [rows]."""
    last = accept_lens.to(torch.int64) - 1
    bonus_tokens.copy_(accept_tokens.view(-1, accept_stride).gather(1, last.unsqueeze(1)).squeeze(1))


def gather_relayed(
    indices: torch.Tensor,
    topk_p: torch.Tensor,
    topk_index: torch.Tensor,
    tokens: torch.Tensor,
    hidden_states: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The rows ``indices`` of each relayed buffer."""
    gathered = None if hidden_states is None else hidden_states[indices]
    return topk_p[indices], topk_index[indices], tokens[indices], gathered


def top_k_renorm(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """``probs`` [rows, vocab] with only the ``top_ks`` [rows] largest of each row left (ties of the last: all)."""
    places = top_ks.to(torch.int64).clamp(1, probs.shape[-1]) - 1
    least = probs.sort(dim=-1, descending=True).values.gather(1, places.unsqueeze(1))
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """``probs`` [rows, vocab] with only the smallest set of largest ones left whose sum reaches ``top_ps`` [rows]."""
    ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    needed = (before < top_ps.to(probs.dtype).unsqueeze(1)).sum(-1).clamp_min(1)
    return top_k_renorm(probs, needed)
