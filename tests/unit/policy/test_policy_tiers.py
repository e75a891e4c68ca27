"""The graph sizes cover every step, are few, and pad little; those that save no time are given up."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_adaptive.policy.tiers import padding, paying_tiers, token_tiers


@given(largest=st.integers(1, 8192))
def test_every_step_fits_and_is_padded_little(largest):
    tiers = token_tiers(largest, [largest])
    assert tiers[0] == 1 and tiers[-1] == largest and tiers == sorted(set(tiers))
    for tokens in range(1, largest + 1):
        assert padding(tiers, tokens) <= max(3, tokens / 8)


def test_256_requests_of_8_tokens_need_few_graphs_and_single_requests_hardly_pad():
    tiers = token_tiers(2048, [8 * size for size in range(1, 257)])
    assert len(tiers) <= 64
    assert tiers[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]


def test_the_hosts_sizes_beyond_the_fine_part_are_kept():
    assert {2200, 2104} <= set(token_tiers(2200, [100, 2104, 2200, 9000]))
    assert 100 not in token_tiers(2200, [100])


@given(largest=st.integers(1, 4096), most=st.integers(1, 80))
@example(largest=1676, most=20)
def test_a_bound_on_their_number_holds_and_keeps_the_largest(largest, most):
    tiers = token_tiers(largest, most=most)
    assert len(tiers) <= most and tiers[-1] == largest
    if most >= 20 and largest <= 4096:
        assert all(after <= 2 * before for before, after in pairwise(tiers))


def test_a_tier_that_saves_nothing_is_given_up_and_a_whole_one_is_not():
    tiers, ms = [8, 16, 24, 32, 64], [1.00, 1.01, 1.02, 1.5, 2.0]
    assert paying_tiers(tiers, ms, 0.05) == [24, 32, 64]
    assert paying_tiers(tiers, ms, 0.05, whole=[8]) == [8, 24, 32, 64]
    assert paying_tiers(tiers, ms, 0.0) == tiers
    assert paying_tiers([8], [1.0], 0.5) == [8]


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=40), st.floats(0.0, 0.5))
def test_no_step_gets_dearer_by_more_than_the_stated_fraction(ms, least):
    tiers = list(range(1, len(ms) + 1))
    ms = sorted(ms)
    kept = paying_tiers(tiers, ms, least)
    for tier, time in zip(tiers, ms, strict=True):
        serving = next(other for other in kept if other >= tier)
        assert ms[serving - 1] * (1.0 - least) <= time * (1 + 1e-9)


@pytest.mark.parametrize(
    "call", [lambda: token_tiers(0), lambda: token_tiers(8, most=0), lambda: paying_tiers([], [], 0.1)]
)
def test_nothing_to_capture_is_an_error(call):
    with pytest.raises(ValueError):
        call()
    with pytest.raises(ValueError, match="no graph holds 9 tokens"):
        padding([1, 8], 9)
