"""Attention on the CPU for every forward that DSpark serving needs, over the host's paged KV cache.

One path serves extend, decode and target verify: a request contributes ``q_len`` query rows that sit at the end of its
``kv_len`` keys. Uniform and ragged verification differ only in the ``q_len`` of each request. The draft's block is the
same without the causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch.nn.functional import scaled_dot_product_attention

from sglang_adaptive.errors import AdaptiveError

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

# Chain masks are causal, so none is read; the host writes one all the same, and this is its smallest layout.
UNREAD_MASK = VerifyMask(buffer=torch.empty(0, dtype=torch.bool), mode=TreeMaskMode.QLEN_ONLY, max_bs=0, is_read=False)


@dataclass
class Group:
    """Requests computed in one call, padded to the longest of them.

    Attributes:
        rows: int64 [n, max_q], rows of the packed query; a padded place repeats the request's last row.
        real: bool [n, max_q], which places of ``rows`` are real; None when all are.
        slots: int64 [n * max_kv], KV slots; a padded place is slot 0, which the host never hands out.
        max_kv: longest ``kv_len``.
        positions: int64 [n, max_q], index of each query's own key.
        kv_lens: int64 [n].
    """

    rows: torch.Tensor
    real: torch.Tensor | None
    slots: torch.Tensor
    max_kv: int
    positions: torch.Tensor
    kv_lens: torch.Tensor
    masks: dict[tuple[bool, int], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, causal: bool, window: int) -> torch.Tensor | None:
        """Allowed (query, key) pairs, bool [n, max_q, max_kv]; None when every pair is.

        ``window`` counts the keys before a query that it still sees; -1 for all.
        """
        key = (causal, window)
        if key not in self.masks:
            places = torch.arange(self.max_kv)
            if causal:
                allowed = places <= self.positions.unsqueeze(-1)
            else:
                allowed = (places < self.kv_lens.unsqueeze(-1)).unsqueeze(1).expand(*self.positions.shape, -1)
            if window >= 0:
                allowed = allowed & (places >= self.positions.unsqueeze(-1) - window)
            self.masks[key] = None if bool(allowed.all()) else allowed
        return self.masks[key]


def make_group(starts: list[int], q_lens: list[int], kv_lens: list[int], slot_table: torch.Tensor) -> Group:
    """Pad requests into one group.

    Args:
        starts: first packed query row of each request.
        q_lens: query rows of each request, all > 0.
        kv_lens: keys of each request, the queries' own included.
        slot_table: [n, >= max(kv_lens)], KV slot of each position.
    """
    max_q, max_kv = max(q_lens), max(kv_lens)
    q = torch.tensor(q_lens)
    kv = torch.tensor(kv_lens)
    offsets = torch.arange(max_q)
    real = offsets < q.unsqueeze(1)
    within = torch.minimum(offsets, q.unsqueeze(1) - 1)
    slots = slot_table[:, :max_kv].to(torch.int64)
    if min(kv_lens) < max_kv:
        slots = torch.where(torch.arange(max_kv) < kv.unsqueeze(1), slots, 0)
    return Group(
        rows=torch.tensor(starts).unsqueeze(1) + within,
        real=None if min(q_lens) == max_q else real,
        slots=slots.reshape(-1),
        max_kv=max_kv,
        positions=(kv - q).unsqueeze(1) + within,
        kv_lens=kv,
    )


def split_requests(q_lens: list[int], kv_lens: list[int]) -> list[list[int]]:
    """Requests to compute together, such that padding never more than doubles a request's query x key area."""
    order = sorted((i for i, q in enumerate(q_lens) if q > 0), key=lambda i: (q_lens[i], kv_lens[i]))
    groups: list[list[int]] = []
    for i in order:
        if groups:
            members = [*groups[-1], i]
            padded = len(members) * max(q_lens[j] for j in members) * max(kv_lens[j] for j in members)
            if padded <= 2 * sum(q_lens[j] * kv_lens[j] for j in members):
                groups[-1] = members
                continue
        groups.append([i])
    return groups


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: Group,
    output: torch.Tensor,
    *,
    causal: bool,
    window: int,
    scaling: float,
    logit_cap: float = 0.0,
) -> None:
    """Attention of one group, written into its rows of ``output``.

    Args:
        query: [tokens, heads, dim], packed rows.
        keys, values: [slots, kv_heads, dim], the KV cache of the layer.
        output: [tokens, heads, value_dim].
    """
    n, max_q = group.rows.shape
    heads, kv_heads = query.shape[1], keys.shape[1]
    fold = heads // kv_heads
    q = query[group.rows.reshape(-1)].view(n, max_q, kv_heads, fold, -1)
    # The heads that share a key head become further query rows: no key is repeated in memory.
    q = q.permute(0, 2, 3, 1, 4).reshape(n, kv_heads, fold * max_q, -1)
    k = keys.index_select(0, group.slots).view(n, group.max_kv, kv_heads, -1).transpose(1, 2)
    v = values.index_select(0, group.slots).view(n, group.max_kv, kv_heads, -1).transpose(1, 2)
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    mask = group.mask(causal, window)
    if mask is not None:
        mask = mask.unsqueeze(1).expand(n, fold, max_q, group.max_kv).reshape(n, 1, fold * max_q, group.max_kv)
    if logit_cap > 0.0:
        out = _capped(q, k, v, mask, scaling, logit_cap)
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    out = out.view(n, kv_heads, fold, max_q, -1).permute(0, 3, 1, 2, 4).reshape(n * max_q, heads, -1)
    rows = group.rows.reshape(-1)
    if group.real is not None:
        real = group.real.reshape(-1)
        rows, out = rows[real], out[real]
    output.index_copy_(0, rows, out)


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scaling: float, cap: float
) -> torch.Tensor:
    scores = cap * torch.tanh(q @ k.transpose(-1, -2) * (scaling / cap))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v


def query_and_key_lengths(forward_batch: ForwardBatch) -> tuple[list[int], list[int]]:
    """Query rows and keys of each request of a forward, whatever its mode."""
    seq_lens = forward_batch.seq_lens.tolist()
    mode = forward_batch.forward_mode
    if mode.is_decode():
        return [1] * len(seq_lens), seq_lens
    if mode.is_target_verify():
        layout = forward_batch.spec_info.ragged_verify_layout
        if layout is None:
            q_lens = [int(forward_batch.spec_info.draft_token_num)] * len(seq_lens)
        elif layout.verify_lens_cpu is not None:
            q_lens = list(layout.verify_lens_cpu)
        else:
            q_lens = layout.verify_lens.tolist()
        return q_lens, [seq + q for seq, q in zip(seq_lens, q_lens, strict=True)]
    return forward_batch.extend_seq_lens.tolist(), seq_lens


class AdaptiveCpuAttention(AttentionBackend):
    """The platform's attention backend, for multi-head and grouped-query models."""

    def __init__(self, model_runner: ModelRunner):
        super().__init__()
        if model_runner.use_mla_backend:
            raise AdaptiveError(
                "The CPU platform serves multi-head and grouped-query attention only: run this MLA model on a GPU."
            )
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._groups: list[Group] = []

    @property
    def verify_mask(self) -> VerifyMask:
        return UNREAD_MASK

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        q_lens, kv_lens = query_and_key_lengths(forward_batch)
        self.plan(q_lens, kv_lens, forward_batch.req_pool_indices)

    def plan(self, q_lens: list[int], kv_lens: list[int], pool_rows: torch.Tensor) -> None:
        """Prepare a forward of packed rows: ``q_lens`` query rows at the end of ``kv_lens`` keys of each request.

        ``pool_rows`` int64 [requests] are the requests' rows of the host's slot table.
        """
        starts = [0]
        for q_len in q_lens[:-1]:
            starts.append(starts[-1] + q_len)
        self._groups = [
            make_group(
                [starts[i] for i in members],
                [q_lens[i] for i in members],
                [kv_lens[i] for i in members],
                self.req_to_token[pool_rows[members]],
            )
            for members in split_requests(q_lens, kv_lens)
        ]

    def _forward(self, q, k, v, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: bool):
        if layer.is_cross_attention:
            raise AdaptiveError("The CPU platform does not serve cross-attention models: run this model on a GPU.")
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        # Rows that belong to no request (padding of a packed layout) stay zero.
        output = query.new_zeros(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        window = layer.sliding_window_size
        for group in self._groups:
            attend(
                query,
                self.token_to_kv_pool.get_key_buffer(layer.layer_id),
                self.token_to_kv_pool.get_value_buffer(layer.layer_id),
                group,
                output,
                causal=layer.attn_type == AttentionType.DECODER,
                window=-1 if window is None else window,
                scaling=layer.scaling,
                logit_cap=layer.logit_cap,
            )
        return output.view(query.shape[0], -1)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def support_triton(self) -> bool:
        return False
