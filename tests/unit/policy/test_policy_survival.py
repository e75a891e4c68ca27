import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sglang_adaptive.policy.survival import count_invalid, survival

CONFIDENCES = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
    elements=st.one_of(st.floats(0, 1), st.sampled_from([np.nan, np.inf, -np.inf, -1e-9, 1 + 1e-9, -0.0])),
)


@settings(max_examples=500, deadline=None)
@given(CONFIDENCES)
def test_survival_is_the_running_product_until_the_first_invalid_value(confidence):
    got = survival(confidence)
    for row, alive in zip(confidence, got, strict=True):
        product = 1.0
        for value, s in zip(row, alive, strict=True):
            product = product * value if 0 <= value <= 1 else 0.0
            assert s == product


@settings(max_examples=500, deadline=None)
@given(CONFIDENCES)
def test_survival_never_rises_and_stays_a_probability(confidence):
    got = survival(confidence)
    assert np.isfinite(got).all() and (got >= 0).all() and (got <= 1).all()
    assert (np.diff(got, axis=1) <= 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -0.01, 1.01])
def test_an_invalid_value_touches_only_its_own_request(bad):
    confidence = np.full((3, 4), 0.5)
    confidence[1, 2] = bad
    got = survival(confidence)
    assert got[1].tolist() == [0.5, 0.25, 0.0, 0.0]
    assert got[0].tolist() == got[2].tolist() == [0.5, 0.25, 0.125, 0.0625]
    assert count_invalid(confidence) == 1


def test_the_input_is_left_alone_and_requests_are_counted_once():
    confidence = np.array([[np.nan, 2.0], [0.5, 0.5]])
    survival(confidence)
    assert np.isnan(confidence[0, 0]) and confidence[0, 1] == 2.0
    assert count_invalid(confidence) == 1
    assert count_invalid(np.zeros((0, 7))) == 0
