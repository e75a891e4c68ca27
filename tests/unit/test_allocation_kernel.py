"""The kernel of the allocation, interpreted, against the policy's; and when it is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreted import found_by

pytest.importorskip("sglang")
from sglang_adaptive.policy.allocation import allocate
from sglang_adaptive.runtime import allocation_kernel

SCRIPT = Path(__file__).parents[1] / "allocation_cases.py"


@pytest.fixture(scope="module")
def found() -> dict:
    """What the script found under Triton's interpreter."""
    return found_by(SCRIPT)


def test_all_that_is_claimed_of_it_holds(found):
    complaints = {claim: complaint for claim, complaint in found["claims"].items() if complaint}
    assert len(found["claims"]) >= 11 and not complaints, "\n".join(complaints.values())


def test_tensors_on_a_cpu_are_the_policy_s():
    """Where no interpreter was asked for."""
    confidence = torch.tensor([[0.9, 0.8], [0.7, 0.6]])
    assert not allocation_kernel.takes(2, 2, confidence)
    assert allocation_kernel.allocate(confidence, 3).tolist() == allocate(confidence, 3).tolist() == [3, 2]


@pytest.mark.parametrize(
    ("max_requests", "width", "sizes"),
    [
        (1, 7, [(32, 8)]),
        (33, 8, [(32, 8), (128, 8)]),
        (512, 9, [(rows, width) for width in (8, 16) for rows in (32, 128, 512)]),
        (2048, 16, [(rows, width) for width in (8, 16) for rows in (32, 128, 512, 2048)]),
    ],
)
def test_every_size_that_serving_meets_is_compiled_ahead(monkeypatch, max_requests, width, sizes):
    asked = []
    monkeypatch.setattr(allocation_kernel, "allocate", lambda confidence, budget: asked.append(confidence.shape))
    allocation_kernel.compile_ahead(max_requests, width, "cpu")
    made = [(allocation_kernel._rows(requests), allocation_kernel._width(most)) for requests, most in asked]
    assert made == sizes
    needed = {
        (allocation_kernel._rows(requests), allocation_kernel._width(most))
        for requests in range(1, max_requests + 1)
        for most in range(1, width + 1)
    }
    assert needed == set(sizes)
