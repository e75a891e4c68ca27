"""The planner's parts that need no host process."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")
from sglang_adaptive.policy.allocation import allocate
from sglang_adaptive.policy.config import PolicyConfig
from sglang_adaptive.runtime.device import async_h2d
from sglang_adaptive.runtime.planner import compiled_allocation
from sglang_adaptive.runtime.priorities import Priorities


def requests(*priorities):
    return [SimpleNamespace(priority=priority) for priority in priorities]


def test_a_higher_priority_weighs_more_and_none_weighs_one():
    weights = Priorities(0.5, low_values_first=False).weights(requests(None, 0, 1, 2, -1))
    np.testing.assert_allclose(weights, [1, 1, 1.5, 2.25, 1 / 1.5])


def test_low_values_come_first_where_the_host_says_so():
    weights = Priorities(0.5, low_values_first=True).weights(requests(1, -1))
    assert weights[0] < 1 < weights[1]


def test_extreme_priorities_are_bounded_and_no_priority_is_no_weight():
    assert Priorities(1.0, low_values_first=False).weights(requests(10**9, 0)).max() == 2.0**8
    assert Priorities(1.0, low_values_first=False).weights(requests(None, None)) is None


def test_the_compiled_allocation_gives_what_the_plain_one_gives():
    identity = torch.tensor([[0.0], [1.0]]).repeat(1, 3)
    compiled = compiled_allocation(8, PolicyConfig(), identity)
    assert compiled is not allocate, "torch.compile failed"
    generator = torch.Generator().manual_seed(3)
    for rows in (1, 2, 5, 8):
        confidence = torch.rand((rows, 3), generator=generator)
        for budget in (0, 1, rows, 2 * rows, 3 * rows):
            arguments = {"min_len": 1, "max_len": None, "calibration": identity}
            assert (
                compiled(confidence, budget, **arguments).tolist() == allocate(confidence, budget, **arguments).tolist()
            )


def test_values_arrive_on_the_device():
    assert async_h2d(torch.ones(2), "cpu").tolist() == [1, 1]
