"""Packed verification rows of many requests: each row knows its request, position and cache place, and goes back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.speculative.dspark.dspark_verify_window import BuildRaggedVerifyWindow, ScatterCompactToStrided
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_adaptive.policy.allocation import allocate

WIDTH, ROW = 8, 2048


@pytest.fixture(scope="module", autouse=True)
def cpu_kernels():
    """The host launches Triton for the cache places; the CPU platform has a gather for it."""
    from sglang.kernels.ops.speculative.dspark import dspark_verify_window as module

    from sglang_adaptive.platform_cpu import kernels

    original, module.assign_extend_cache_locs_func = (
        module.assign_extend_cache_locs_func,
        kernels.speculative_cache_locs,
    )
    yield
    module.assign_extend_cache_locs_func = original


def check(lengths: list[int], tier: int, prefix: torch.Tensor, table: torch.Tensor) -> None:
    requests = len(lengths)
    layout = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lengths, device="cpu", grid=[tier])
    pool_rows = torch.randperm(table.shape[0])[:requests]
    blocks = torch.arange(requests * WIDTH).view(requests, WIDTH) * 3
    batch = SimpleNamespace(seq_lens=prefix, req_pool_indices=pool_rows)
    window = BuildRaggedVerifyWindow.execute(
        batch=batch,
        layout=layout,
        draft_block_ids=blocks,
        draft_tokens=blocks[:, 1:],
        bs=requests,
        device="cpu",
        verify_num_draft_tokens=WIDTH,
        model_runner=SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table)),
    )
    within = torch.arange(WIDTH)
    real = within < torch.tensor(lengths).unsqueeze(1)
    total = sum(lengths)
    places = prefix.unsqueeze(1) + within
    assert torch.equal(window.positions[:total], places[real])
    assert torch.equal(window.verify_ids[:total], blocks[real])
    assert torch.equal(window.verify_cache_loc[:total].long(), table[pool_rows.unsqueeze(1), places][real].long())
    assert window.positions.numel() == tier and not window.verify_cache_loc[total:].any()
    rows = torch.arange(tier, dtype=torch.float32).unsqueeze(1) + 1
    strided = ScatterCompactToStrided.execute(
        compact=rows, layout=layout, fill_value=0.0, verify_num_draft_tokens=WIDTH
    ).view(requests, WIDTH)
    assert torch.equal(strided[real], rows[:total, 0]) and not strided[~real].any()


def test_lengths_of_4_and_3_many_times():
    """[4] * 72 + [3] * 24, in every order."""
    torch.manual_seed(0)
    table = torch.randperm(96 * ROW).view(96, ROW) + 1
    lengths = torch.tensor([4] * 72 + [3] * 24)
    for _ in range(500):
        prefix = torch.randint(1, ROW - WIDTH, (96,))
        check(lengths[torch.randperm(96)].tolist(), 384, prefix, table)


@pytest.mark.parametrize("lengths", [[1] * 192, [6] * 32, [8] * 24, [1, 8] * 20, [8], [1]], ids=str)
def test_different_numbers_of_requests_in_one_tier(lengths):
    torch.manual_seed(1)
    table = torch.randperm(200 * ROW).view(200, ROW) + 1
    for _ in range(20):
        check(lengths, 192, torch.randint(1, ROW - WIDTH, (len(lengths),)), table)


@pytest.mark.parametrize("confidence", [float("nan"), float("inf"), -1.0, 0.0, 1.0])
def test_any_confidences_make_lengths_that_can_be_packed(confidence):
    torch.manual_seed(2)
    table = torch.randperm(64 * ROW).view(64, ROW) + 1
    values = torch.rand(64, WIDTH - 1)
    values[::3] = confidence
    for budget in (0, 1, 63, 64, 200, 448):
        lengths = allocate(values, budget).tolist()
        assert sum(lengths) == 64 + budget and min(lengths) >= 1 and max(lengths) <= WIDTH
        check(lengths, 512, torch.randint(1, ROW - WIDTH, (64,)), table)
