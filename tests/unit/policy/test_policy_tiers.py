"""The graph sizes cover every step, are few, and pad little."""

import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_adaptive.policy.tiers import token_tiers


@given(largest=st.integers(1, 8192))
def test_every_step_fits_and_is_padded_little(largest):
    tiers = token_tiers(largest, [largest])
    assert tiers[0] == 1 and tiers[-1] == largest and tiers == sorted(set(tiers))
    for tokens in range(1, largest + 1):
        padded = tiers[bisect.bisect_left(tiers, tokens)]
        assert padded - tokens <= max(3, tokens / 8)


def test_256_requests_of_8_tokens_need_few_graphs():
    assert len(token_tiers(2048, [8 * size for size in range(1, 257)])) <= 64


def test_no_graph_is_an_error():
    with pytest.raises(ValueError, match="0 tokens"):
        token_tiers(0, [])
