"""The tool that counts the kernels of an allocation; kernels themselves need a GPU."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("sglang")
from sglang_adaptive.benchmarks import allocation
from sglang_adaptive.errors import AdaptiveError


def test_the_compiled_allocation_gives_the_lengths_of_the_uncompiled_one(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(allocation, "CASES", ((2, 3), (8, 3)))
    assert allocation.main(["--device", "cpu", "--rounds", "2", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["requests"] for row in rows] == [2, 8]
    assert all(row["equal"] and row["kernels"] == 0 and row["us"] > 0 for row in rows)
    assert "| 8 x 3 | 0 |" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(AdaptiveError, match="There is no CUDA GPU"):
        allocation.main([])


@pytest.mark.gpu
def test_an_allocation_takes_at_most_three_kernels() -> None:
    for requests, drafts in allocation.CASES:
        row = allocation.measure(requests, drafts, "cuda", rounds=20)
        assert row["equal"] and row["kernels"] <= 3, row["names"]
