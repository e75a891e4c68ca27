"""LoRA adapters over rows that are packed with a different number for each request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.platform_cpu.lora import AdaptiveCpuLora, segments

RANKS, SCALINGS = [0, 2, 3], [0.0, 2.0, 0.5]
INPUTS, SLICES = 5, (4, 6)


def batch(mode: ForwardMode, **fields) -> SimpleNamespace:
    requests = 4
    return SimpleNamespace(forward_mode=mode, batch_size=requests, seq_lens=torch.full((requests,), 7), **fields)


def verify(layout, width=6) -> SimpleNamespace:
    return batch(
        ForwardMode.TARGET_VERIFY, spec_info=SimpleNamespace(draft_token_num=width, ragged_verify_layout=layout)
    )


BATCHES = {
    "decode": (batch(ForwardMode.DECODE), [1, 1, 1, 1]),
    "extend": (batch(ForwardMode.EXTEND, extend_seq_lens=torch.tensor([3, 1, 2, 5])), [3, 1, 2, 5]),
    "uniform verification": (verify(None, width=3), [3, 3, 3, 3]),
    "ragged verification": (verify(SimpleNamespace(verify_lens_cpu=[1, 4, 2, 6])), [1, 4, 2, 6]),
    "ragged verification, lengths on the device": (
        verify(SimpleNamespace(verify_lens_cpu=None, verify_lens=torch.tensor([2, 1, 1, 3]))),
        [2, 1, 1, 3],
    ),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("adapters", [[1, 2, 1, 0], [2, 2, 0, 1], [0, 0, 0, 0]])
def test_each_row_gets_the_adapter_of_its_request(name, adapters):
    forward_batch, lens = BATCHES[name]
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    rank = max(RANKS)
    down, up = draw(3, len(SLICES) * rank, INPUTS), draw(3, sum(SLICES), rank)
    x, base = draw(sum(lens), INPUTS), draw(sum(lens), sum(SLICES))

    wanted, row = base.clone(), 0
    for adapter, length in zip(adapters, lens, strict=True):
        for start, stop, place in ((0, SLICES[0], 0), (SLICES[0], sum(SLICES), 1)):
            r = RANKS[adapter]  # the pool packs the slices of an adapter one after the other
            low = x[row : row + length] @ down[adapter, place * r : (place + 1) * r].T
            wanted[row : row + length, start:stop] += SCALINGS[adapter] * low @ up[adapter, start:stop, :r].T
        row += length

    backend = AdaptiveCpuLora(max_loras_per_batch=3, device=torch.device("cpu"))
    backend.prepare_lora_batch(forward_batch, adapters, RANKS, SCALINGS, use_cuda_graph=False)
    offsets = torch.tensor([0, SLICES[0], sum(SLICES)])
    found = backend.run_qkv_lora(
        x, down, up, offsets, offsets, max_qkv_out_dim=6, base_output=base.clone(), n_slices=len(SLICES)
    )
    torch.testing.assert_close(found, wanted)


def test_neighbours_of_one_adapter_are_one_segment():
    assert segments([1, 1, 0, 1], [2, 3, 1, 4]) == ([1, 0, 1], [5, 1, 4])
    assert segments([], []) == ([], [])


def test_adapters_of_the_output_head_are_refused():
    backend = AdaptiveCpuLora(max_loras_per_batch=1, device=torch.device("cpu"))
    backend.validate_lora_targets(torch.nn.Module(), {"qkv_proj"})
    with pytest.raises(AdaptiveError, match="without lm_head"):
        backend.validate_lora_targets(torch.nn.Module(), {"qkv_proj", "lm_head"})


def test_adapters_of_experts_are_refused():
    backend = AdaptiveCpuLora(max_loras_per_batch=1, device=torch.device("cpu"))
    experts = FusedMoE.__new__(FusedMoE)
    torch.nn.Module.__init__(experts)
    mixture, dense = torch.nn.Sequential(torch.nn.Linear(2, 2), experts), torch.nn.Sequential(torch.nn.Linear(2, 2))
    backend.validate_lora_targets(dense, {"qkv_proj", "gate_up_proj", "down_proj"})
    backend.validate_lora_targets(mixture, {"qkv_proj", "o_proj"})
    with pytest.raises(AdaptiveError, match="experts of a mixture"):
        backend.validate_lora_targets(mixture, {"qkv_proj", "gate_up_proj", "down_proj"})
