import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_adaptive.policy import allocation
from sglang_adaptive.policy.allocation import allocate, allocate_reference

MANY = settings(max_examples=2000, deadline=None)
SOME = settings(max_examples=500, deadline=None)
# Few distinct values make ties the rule.
VALUES = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.75, 1.0, 1.0, float("nan"), float("inf"), -0.5, 1.5])


@st.composite
def instances(draw):
    requests, width = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    values = draw(st.lists(VALUES, min_size=requests * width, max_size=requests * width))
    budget = draw(st.integers(0, requests * width + 2))
    return np.array(values, np.float32).reshape(requests, width), budget


def run(confidence, budget, **options):
    return allocate(torch.from_numpy(confidence), budget, **options).numpy()


@pytest.fixture(params=["counting", "sorting"])
def ranking(request, monkeypatch):
    monkeypatch.setitem(allocation._COUNTING_LIMIT, "cpu", 1 << 30 if request.param == "counting" else 0)


def with_both_rankings(check):
    def run_both(*args):
        limit = allocation._COUNTING_LIMIT["cpu"]
        try:
            for allocation._COUNTING_LIMIT["cpu"] in (1 << 30, 0):
                check(*args)
        finally:
            allocation._COUNTING_LIMIT["cpu"] = limit

    return run_both


@MANY
@given(instances(), st.data())
def test_equals_the_one_by_one_reference(instance, data):
    confidence, budget = instance
    requests, width = confidence.shape
    options = {"min_len": data.draw(st.integers(1, width + 1))}
    options["max_len"] = data.draw(st.one_of(st.none(), st.integers(options["min_len"], width + 1)))
    weights = data.draw(
        st.one_of(st.none(), st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=requests, max_size=requests))
    )
    as_array = None if weights is None else np.array(weights, np.float32)
    as_tensor = None if weights is None else torch.tensor(weights)
    wanted = allocate_reference(confidence, budget, weights=as_array, **options)

    @with_both_rankings
    def check():
        assert run(confidence, budget, weights=as_tensor, **options).tolist() == wanted.tolist()

    check()


CONTINUOUS = given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 15))


@settings(max_examples=300, deadline=None)
@CONTINUOUS
def test_takes_the_largest_survivals_of_continuous_values(seed, requests, width):
    """Products that agree to the last bit but one may trade places, so the taken survivals are compared, not who."""
    random = np.random.default_rng(seed)
    confidence = random.random((requests, width), dtype=np.float32)
    budget = int(random.integers(0, requests * width + 1))
    alive = np.cumprod(confidence.astype(np.float64), axis=1)
    best = np.sort(alive.ravel())[::-1][:budget].sum()

    @with_both_rankings
    def check():
        lengths = run(confidence, budget)
        assert lengths.sum() == requests + budget
        assert alive[np.arange(width) < (lengths - 1)[:, None]].sum() == pytest.approx(best, rel=1e-5)

    check()


@settings(max_examples=300, deadline=None)
@CONTINUOUS
def test_no_rounding_lets_a_later_value_decide(seed, requests, width):
    """Values next to 1, where products differ in their last bit only, and every tail changed at once by row."""
    random = np.random.default_rng(seed)
    confidence = (1 - random.random((requests, width)) * 2.0**-22).astype(np.float32)
    budget = int(random.integers(0, requests * width + 1))
    row, position = int(random.integers(requests)), int(random.integers(width))
    changed = confidence.copy()
    changed[row, position + 1 :] = random.choice([0.0, 1.0, np.nan], width - position - 1)

    @with_both_rankings
    def check():
        before, after = run(confidence, budget), run(changed, budget)
        assert min(before[row] - 1, position + 1) == min(after[row] - 1, position + 1)

    check()


@SOME
@given(instances())
def test_the_sum_is_known_without_reading_back(instance):
    confidence, budget = instance
    lengths = run(confidence, budget)
    assert lengths.sum() == confidence.shape[0] + min(budget, confidence.size)
    assert lengths.dtype == np.int32 and (lengths >= 1).all() and (lengths <= confidence.shape[1] + 1).all()


@MANY
@given(instances(), st.data())
def test_whether_a_position_is_verified_does_not_depend_on_later_values_of_its_request(instance, data):
    """What makes the rule lossless: position j of a request is verified, or not, whatever its values after j are.

    Other requests may gain or lose by them, and position j does look at the others' values: those are independent of
    this request's tokens given its past.
    """
    confidence, budget = instance
    row = data.draw(st.integers(0, confidence.shape[0] - 1))
    position = data.draw(st.integers(0, confidence.shape[1] - 1))
    tail = confidence.shape[1] - position - 1
    changed = confidence.copy()
    changed[row, position + 1 :] = data.draw(st.lists(VALUES, min_size=tail, max_size=tail))

    @with_both_rankings
    def check():
        before, after = run(confidence, budget), run(changed, budget)
        # Drafts of the row up to and including ``position``.
        assert min(before[row] - 1, position + 1) == min(after[row] - 1, position + 1)

    check()


@SOME
@given(instances(), st.data())
def test_values_behind_the_first_trimmed_token_change_nobody(instance, data):
    """Stronger, and true for all requests: what is behind the first trimmed token had no say in any length."""
    confidence, budget = instance
    before = run(confidence, budget)
    changed = confidence.copy()
    for row, length in enumerate(before):
        tail = max(0, confidence.shape[1] - int(length))
        if tail:
            changed[row, length:] = data.draw(st.lists(VALUES, min_size=tail, max_size=tail))
    assert run(changed, budget).tolist() == before.tolist()


@SOME
@given(instances())
def test_a_request_that_was_cut_lost_to_tokens_at_least_as_likely(instance):
    confidence, budget = instance
    lengths = run(confidence, budget)
    inside = (confidence >= 0) & (confidence <= 1)
    alive = np.cumprod(np.where(inside, confidence, 0), axis=1, dtype=np.float32)
    taken = np.arange(confidence.shape[1]) < (lengths - 1)[:, None]
    if taken.any() and not taken.all():
        assert alive[taken].min() >= alive[~taken].max()


def test_invalid_values_stay_with_their_request(ranking):
    confidence = np.full((3, 4), 0.9, np.float32)
    confidence[1] = [0.9, np.nan, 0.9, 0.9]
    assert run(confidence, 9).tolist() == [5, 2, 5]
    # Only a budget that nobody else can use reaches behind the invalid value.
    assert run(confidence, 10).tolist() == [5, 3, 5]
    assert run(confidence, 12).tolist() == [5, 5, 5]


def test_ties_go_to_the_earlier_position_then_to_the_lower_row(ranking):
    confidence = np.ones((3, 2), np.float32)
    assert [run(confidence, b).tolist() for b in range(7)] == [
        [1, 1, 1],
        [2, 1, 1],
        [2, 2, 1],
        [2, 2, 2],
        [3, 2, 2],
        [3, 3, 2],
        [3, 3, 3],
    ]


def test_weights_serve_priority_first_and_bad_weights_count_as_one(ranking):
    confidence = np.full((2, 3), 0.5, np.float32)
    assert run(confidence, 3, weights=torch.tensor([1.0, 8.0])).tolist() == [1, 4]
    for bad in (float("nan"), float("inf"), 0.0, -1.0):
        assert run(confidence, 3, weights=torch.tensor([1.0, bad])).tolist() == run(confidence, 3).tolist()


def test_length_bounds(ranking):
    confidence = np.array([[0.9, 0.9, 0.9], [0.1, 0.1, 0.1]], np.float32)
    assert run(confidence, 3).tolist() == [4, 1]
    assert run(confidence, 3, min_len=2).tolist() == [3, 2]
    assert run(confidence, 3, max_len=3).tolist() == [3, 2]
    assert run(confidence, 6, max_len=1).tolist() == [1, 1]
    # A budget below the minimum is still kept: positions first, then rows.
    assert run(confidence, 1, min_len=3).tolist() == [2, 1]


def test_a_budget_on_the_device_equals_a_number(ranking):
    confidence = np.random.default_rng(1).random((5, 4), dtype=np.float32)
    for budget in (0, 7, 20, 99):
        assert run(confidence, torch.tensor(budget)).tolist() == run(confidence, budget).tolist()


def test_no_requests():
    assert run(np.zeros((0, 7), np.float32), 3).tolist() == []


def test_compiles_to_one_graph_for_every_batch_size_and_budget(ranking):
    """No graph break, no read-back (a fake tensor has no value to read), one symbolic graph for all R and B."""
    compiled = torch.compile(allocate, fullgraph=True, dynamic=True, backend="eager")
    random = np.random.default_rng(2)
    for requests in (3, 8, 33):
        confidence = random.random((requests, 7), dtype=np.float32)
        for budget in (0, requests, 5 * requests):
            got = compiled(torch.from_numpy(confidence), torch.tensor(budget)).numpy()
            assert got.tolist() == allocate_reference(confidence, budget).tolist()
