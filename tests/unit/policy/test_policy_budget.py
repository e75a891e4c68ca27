import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import best_budget, staircase, staircases, stairs_cost, survivals

from sglang_adaptive.policy import budget as reasons
from sglang_adaptive.policy.budget import size_budget
from sglang_adaptive.policy.cost import CostModel

MANY = settings(max_examples=2000, deadline=None)
SOME = settings(max_examples=500, deadline=None)


@MANY
@given(survivals(), staircases(), st.integers(0, 10))
def test_ratio_equals_brute_force(alive, model, prefill):
    anchors = alive.shape[0] + prefill
    got = size_budget(alive, model, anchors, 0.0)
    budget, value = best_budget(alive, model, anchors)
    if not model.is_informative:
        assert got.uniform and got.reason == reasons.NO_TABLE
        return
    assert got.budget == budget
    assert got.expected_tokens / got.predicted_ms == value
    assert got.uniform == (budget == alive.size)


@MANY
@given(survivals(), staircases(), st.integers(1, 32))
def test_rate_equals_brute_force(alive, model, sixteenths):
    if not model.is_informative:
        return
    rate, anchors = sixteenths / 16, alive.shape[0]
    got = size_budget(alive, model, anchors, 0.0, rate_tokens_per_ms=rate)
    budget, value = best_budget(alive, model, anchors, rate)
    assert got.budget == budget
    assert got.expected_tokens - rate * got.predicted_ms == value


@pytest.mark.parametrize("edge", range(2, 17))
@pytest.mark.parametrize("aim", [-1, 0, 1])
def test_every_tier_edge(edge, aim):
    """``worth`` tokens are sure and the rest hopeless; the edge lies just before, at or after the last sure one."""
    alive = np.zeros((2, 8))
    worth = max(0, min(16, edge - 2 + aim))
    alive[0, : min(8, worth)] = 1.0
    alive[1, : max(0, worth - 8)] = 1.0
    model = staircase([edge, 64] if edge > 2 else [2, 3, 64], [1.0, 4.0] if edge > 2 else [1.0, 2.0, 4.0])
    got = size_budget(alive, model, 2, 0.0)
    budget, _ = best_budget(alive, model, 2)
    assert got.budget == budget
    assert got.predicted_ms == stairs_cost(model, 2 + budget)


def test_the_scan_is_global_not_the_first_fall():
    """Ratio by budget: 1, .75, .9, 1.2: a search that stops at the first fall verifies nothing."""
    model = staircase([1, 2, 8], [1.0, 2.0, 2.5])
    alive = np.array([[0.5, 0.5, 0.5, 0.5, 0.5]])
    assert size_budget(alive, model, 1, 0.0).budget == 5


def test_equal_objective_fills_the_tier():
    model = staircase([2, 6, 32], [1.0, 2.0, 100.0])
    alive = np.array([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    got = size_budget(alive, model, 2, 0.0)
    assert got.budget == 4 and got.expected_tokens == 4.0


def test_minimum_gain_guard_and_its_hysteresis():
    model = staircase([2, 4], [1.0, 1.9])
    alive = np.array([[0.9, 0.0, 0.0]])  # trimmed to one token: 1.9 / 1.0 against 1.9 / 1.9
    trimmed = size_budget(alive, model, 1, 0.0, min_gain=0.89)
    assert trimmed.budget == 1 and trimmed.reason == reasons.TRIMMED and trimmed.gain == pytest.approx(0.9)
    kept = size_budget(alive, model, 1, 0.0, min_gain=0.91)
    assert kept.uniform and kept.reason == reasons.SMALL_GAIN and kept.budget == 3
    assert size_budget(alive, model, 1, 0.0, min_gain=0.91, previous=trimmed).budget == 1
    assert size_budget(alive, model, 1, 0.0, min_gain=0.91, previous=kept).uniform


def test_the_price_of_a_ragged_step_is_part_of_its_cost():
    model = staircase([2, 4], [1.0, 1.9])
    alive = np.array([[0.9, 0.0, 0.0]])
    assert size_budget(alive, model, 1, 0.0, trim_ms=0.8).budget == 1
    assert size_budget(alive, model, 1, 0.0, trim_ms=1.0).uniform


def test_without_a_table_everything_is_verified():
    alive = np.full((3, 7), 0.01)
    for model in (CostModel.empty(), staircase([32], [5.0]), staircase([8, 32], [5.0, 5.0])):
        got = size_budget(alive, model, 3, 0.0)
        assert (got.budget, got.uniform, got.draft, got.reason) == (21, True, True, reasons.NO_TABLE)


@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (0, 0)])
def test_nothing_to_size(shape):
    got = size_budget(np.ones(shape), staircase([2, 4], [1.0, 2.0]), shape[0], 0.0)
    assert (got.budget, got.uniform) == (0, True)


@SOME
@given(survivals(), staircases(), st.data())
def test_weights_decide_who_is_served_not_how_a_token_is_counted(alive, model, data):
    if not model.is_informative:
        return
    requests = alive.shape[0]
    weights = np.array(data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=requests, max_size=requests)))
    got = size_budget(alive, model, requests, 0.0, weights=weights)
    share = weights / weights.mean()
    order = sorted(range(alive.size), key=lambda i: -(alive * share[:, None]).ravel()[i])
    best, expected = 0.0, []
    for budget in range(alive.size + 1):
        gained = requests + sum((alive * share[:, None]).ravel()[i] for i in order[:budget])
        expected.append(requests + sum(alive.ravel()[i] for i in order[:budget]))
        best = max(best, gained / stairs_cost(model, requests + budget))
    chosen = requests + sum((alive * share[:, None]).ravel()[i] for i in order[: got.budget])
    assert chosen / stairs_cost(model, requests + got.budget) == pytest.approx(best, rel=1e-12)
    assert got.expected_tokens == pytest.approx(expected[got.budget])


def test_equal_weights_change_nothing():
    alive = np.array([[0.9, 0.5], [0.8, 0.1]])
    model = staircase([2, 3, 4, 6], [1.0, 1.2, 1.9, 3.0])
    plain, weighted = (size_budget(alive, model, 2, 0.0, weights=w) for w in (None, np.array([3.0, 3.0])))
    assert dataclasses.replace(weighted, gain=plain.gain) == plain
    assert weighted.gain == pytest.approx(plain.gain)


@SOME
@given(survivals(), staircases(), st.data())
def test_length_bounds_equal_brute_force(alive, model, data):
    if not model.is_informative:
        return
    requests, width = alive.shape
    least = data.draw(st.integers(0, width))
    most = data.draw(st.integers(least, width))
    got = size_budget(alive, model, requests, 0.0, min_len=least + 1, max_len=most + 1)
    free = sorted(alive[:, least:most].ravel().tolist(), reverse=True)
    values = [
        (requests + alive[:, :least].sum() + sum(free[:extra])) / stairs_cost(model, requests * (1 + least) + extra)
        for extra in range(len(free) + 1)
    ]
    wanted = max(extra for extra, value in enumerate(values) if value == max(values))
    if most == 0:
        assert got.budget == 0
    else:
        assert got.budget == requests * least + wanted
    assert got.uniform == (got.budget == alive.size)
