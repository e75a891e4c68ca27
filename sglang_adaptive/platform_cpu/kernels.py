"""Torch twins of the host's Triton kernels that have none, for CPU tensors."""

from __future__ import annotations

from typing import Any

import torch


def ranges(starts: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and position of every place of ``[starts, ends)``, row by row; two int64 tensors [sum of lengths]."""
    lengths = (ends - starts).to(torch.int64)
    rows = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    firsts = torch.cumsum(lengths, 0) - lengths
    return rows, torch.arange(rows.numel()) + (starts.to(torch.int64) - firsts)[rows]


def speculative_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """KV slots of positions ``[start_offset, end_offset)`` of every request, packed request by request, int64."""
    rows, positions = ranges(start_offset, end_offset)
    return req_to_token[req_pool_indices[rows], positions].to(torch.int64)


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write packed KV slots into positions ``[start_offset, end_offset)`` of every request's row."""
    rows, positions = ranges(start_offset, end_offset)
    req_to_token[req_pool_indices[rows], positions] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def chain_speculative_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
) -> None:
    """Chain rejection sampling (Leviathan et al. 2023), results written in place as the host's kernel does.

    Args:
        predicts: int [rows * slots], written where ``retrive_index`` points: accepted drafts, then the sampled token.
        accept_index: int [rows, slots], written: ``retrive_index`` of the root and of each accepted draft.
        accept_token_num: int [rows], written: accepted drafts.
        candidates: int [rows, slots], the root and the drafts.
        uniform_samples: [rows, >= slots - 1]; uniform_samples_for_final_sampling: [rows]; uniform in [0, 1).
        target_probs: [rows, slots, vocab]; draft_probs: [rows, slots - 1, vocab].
    """
    rows, slots = candidates.shape
    drafts = candidates[:, 1:].to(torch.int64)
    p = target_probs[:, :-1].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    q = draft_probs.gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    accepted = (q > 0) & (q <= 1) & (uniform_samples[:, : slots - 1] * q < p)
    count = torch.cumprod(accepted.to(torch.int64), dim=1).sum(1)
    row = torch.arange(rows)
    rest = target_probs[row, count]
    rejected = count < slots - 1
    if bool(rejected.any()):
        q_row = draft_probs[row[rejected], count[rejected]]
        q_row = torch.where((q_row >= 0) & (q_row <= 1), q_row, 0.0)
        rest = rest.clone()
        rest[rejected] = (rest[rejected] - q_row).clamp_min(0.0)
    final = draw(rest, uniform_samples_for_final_sampling)
    write_chain(predicts, accept_index, accept_token_num, retrive_index, drafts, count, final)


def draw(mass: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """Tokens drawn in proportion to ``mass`` [rows, vocab], which need not sum to 1, by ``coins`` [rows] in [0, 1)."""
    cumulated = torch.cumsum(mass.double(), dim=-1)
    threshold = coins.double().unsqueeze(1) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, threshold, right=True).squeeze(1).clamp_max(mass.shape[-1] - 1)


def write_chain(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    retrive_index: torch.Tensor,
    drafts: torch.Tensor,
    count: torch.Tensor,
    final: torch.Tensor,
) -> None:
    """Write what each chain commits: its first ``count`` of ``drafts`` [rows, slots - 1], then ``final`` [rows]."""
    rows, slots = retrive_index.shape
    tokens = torch.cat([drafts, final.unsqueeze(1)], dim=1)
    tokens[torch.arange(rows), count] = final
    written = torch.arange(slots) <= count.unsqueeze(1)
    predicts[retrive_index[written].to(torch.int64)] = tokens[written].to(predicts.dtype)
    accept_index[written] = retrive_index[written].to(accept_index.dtype)
    accept_token_num.copy_(count)


_LOW = 0xFFFFFFFF


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits, Appleby 2011) of four words: the seed's low and high half, the position, the column.

    Args:
        seed: 64-bit integers [rows]; positions: integers [rows]; col_indices: integers [columns].

    Returns:
        int64 [rows, columns] in [0, 2^32).
    """
    seed, positions = seed.to(torch.int64).unsqueeze(1), positions.to(torch.int64).unsqueeze(1)
    h = torch.zeros_like(seed)
    for word in (seed, seed >> 32, positions, col_indices.to(torch.int64).unsqueeze(0)):
        k = ((word & _LOW) * 0xCC9E2D51) & _LOW
        h = h ^ ((_rotated(k, 15) * 0x1B873593) & _LOW)
        h = (_rotated(h, 13) * 5 + 0xE6546B64) & _LOW
    h = h ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _LOW
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _LOW
    return h ^ (h >> 16)


def _rotated(word: torch.Tensor, by: int) -> torch.Tensor:
    """32-bit words, rotated to the left."""
    return ((word << by) | (word >> (32 - by))) & _LOW
