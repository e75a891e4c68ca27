"""LoRA adapters on the CPU: the host's torch backend over batches whose requests bring any number of rows."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend, TorchNativeLoRABatchInfo

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.platform_cpu.attention import query_and_key_lengths

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def segments(weight_indices: list[int], q_lens: list[int]) -> tuple[list[int], list[int]]:
    """Neighbouring requests of one adapter joined: the adapter's index and the rows of each run."""
    rows = zip(weight_indices, q_lens, strict=True)
    joined = [(index, sum(q for _, q in run)) for index, run in groupby(rows, key=lambda row: row[0])]
    return [index for index, _ in joined], [length for _, length in joined]


class AdaptiveCpuLora(TorchNativeLoRABackend):
    """Takes each request's rows from the forward itself, as the attention does, and pins no memory."""

    def validate_lora_targets(self, base_model: torch.nn.Module, target_modules: set[str]) -> None:
        if "lm_head" in target_modules:
            raise AdaptiveError(
                "The CPU platform does not apply LoRA adapters to the output head: use an adapter without lm_head, or "
                "leave it out of --lora-target-modules."
            )
        # The host wraps a target's experts where an adapter changes both projections.
        experts = any(isinstance(module, FusedMoE) for module in base_model.modules())
        if experts and {"gate_up_proj", "down_proj"} <= target_modules:
            raise AdaptiveError(
                "The CPU platform does not apply LoRA adapters to the experts of a mixture: use an adapter without "
                "gate_proj, up_proj and down_proj, or leave them out of --lora-target-modules."
            )

    def prepare_lora_batch(
        self,
        forward_batch: ForwardBatch,
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
        use_cuda_graph: bool,
        use_prefill_cuda_graph: bool = False,
    ) -> None:
        """``weight_indices`` has the adapter of each request; ranks and scalings are those of each adapter."""
        indices, lengths = segments(weight_indices, query_and_key_lengths(forward_batch)[0])
        integers = {"dtype": torch.int32}
        weights, lens = torch.tensor(indices, **integers), torch.tensor(lengths, **integers)
        bounds = torch.nn.functional.pad(lens.cumsum(0, **integers), (1, 0))
        ranks, factors = torch.tensor(lora_ranks, **integers), torch.tensor(scalings, dtype=torch.float)
        self.batch_info = TorchNativeLoRABatchInfo(
            use_cuda_graph=False,
            bs=forward_batch.batch_size,
            num_segments=len(indices),
            max_len=max(lengths, default=0),
            seg_lens=lens,
            seg_lens_cpu=lens,
            seg_indptr=bounds,
            seg_indptr_cpu=bounds,
            weight_indices=weights,
            weight_indices_cpu=weights,
            lora_ranks=ranks,
            lora_ranks_cpu=ranks,
            scalings=factors,
            scalings_cpu=factors,
        )
