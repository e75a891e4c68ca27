"""Attention of a draft that decodes several steps on end, each on what the step before has written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_adaptive.platform_cpu.attention import AdaptiveCpuAttention
from sglang_adaptive.platform_cpu.chains import refuse_tree

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class DraftSteps:
    """One backend for each forward of a chain draft; the host reads ``attn_backends``.

    The first draft token comes from the forward before (prefill or draft-extend), so ``num_steps`` tokens take
    ``num_steps - 1`` forwards. All are planned at once, before the first.
    """

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: ModelRunner, topk: int, num_steps: int):
        refuse_tree(topk)
        self.attn_backends = [AdaptiveCpuAttention(model_runner) for _ in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan every step: one query per request; at step ``i`` it is preceded by ``seq_len + i`` keys."""
        seq_lens = forward_batch.seq_lens.tolist()
        for step, backend in enumerate(self.attn_backends):
            kv_lens = [seq_len + step + 1 for seq_len in seq_lens]
            backend.plan([1] * len(kv_lens), kv_lens, forward_batch.req_pool_indices)
