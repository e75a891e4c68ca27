"""The planner's parts that need no host process."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")
from sglang_adaptive.policy.allocation import allocate
from sglang_adaptive.policy.budget import LOW_LOAD, TRIMMED, Decision
from sglang_adaptive.policy.config import PolicyConfig
from sglang_adaptive.policy.steady import Steady
from sglang_adaptive.runtime.compiled_allocation import compiled_allocation
from sglang_adaptive.runtime.device import async_h2d
from sglang_adaptive.runtime.planner import StepPlanner
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


def planner_with(engine, steady):
    """A planner as it is while it serves, of which only ``size`` runs."""
    made = object.__new__(StepPlanner)
    generations = torch.zeros(8, dtype=torch.int64)
    made.__dict__.update(
        ragged=True,
        gamma=3,
        estimate=None,
        model_runner=SimpleNamespace(req_to_token_pool=SimpleNamespace(req_generation=generations)),
        decision=None,
        _sized=None,
        _engine=engine,
        _steady=steady,
        _may_repeat=True,
        _repeating=False,
        _priorities=None,
        _log_every=False,
        _trace=None,
        _relay=SimpleNamespace(collect=lambda iteration: [], read=lambda slots, generations: (None, None)),
        _edges=[8, 12, 16],
        _bounds=(0, 3),
    )
    return made


@pytest.mark.parametrize(
    ("decision", "budgets"),
    [
        (Decision(6, True, True, 3.0, 2.0, LOW_LOAD), [6, 6, 9, 6, 6, 6, 6, 6]),
        (Decision(6, True, False, 3.0, 2.0, TRIMMED), [6, 6, 9, 6, 6, 6, 6, 6]),
    ],
    ids=lambda value: getattr(value, "reason", ""),
)
def test_repeated_steps_are_not_sized_and_the_engine_hears_how_many_they_were(decision, budgets):
    heard = []
    engine = SimpleNamespace(size=lambda confidence, repeated=0, **_: heard.append(repeated) or decision)
    planner = planner_with(engine, Steady(every=4, streak=1, every_trim=4, streak_trim=1, learn_steps=0))
    sizes = [2, 2, 3, 2, 2, 2, 2, 2]
    found = []
    for iteration, requests in enumerate(sizes):
        batch = SimpleNamespace(
            forward_iter=iteration,
            forward_mode=SimpleNamespace(is_extend=lambda: False),
            is_extend_in_batch=False,
            batch_size=lambda requests=requests: requests,
            req_pool_indices_cpu=torch.arange(requests),
            seq_lens_cpu=torch.full((requests,), 9),
            reqs=[],
        )
        planner.size(batch)
        found.append(planner.decision.budget)
    assert heard == [0, 0, 3]
    assert found == budgets
