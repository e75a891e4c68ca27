"""From confidences to survivals: the probability that a draft token is accepted together with all before it."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def _invalid(confidence: Floats) -> Bools:
    # NaN compares false with everything, so "not inside" catches it together with the infinities.
    return ~((confidence >= 0.0) & (confidence <= 1.0))


def survival(confidence: Floats) -> Floats:
    """Cumulative product along the draft positions.

    ``confidence`` is ``[requests, K]``, each the probability that a draft token is accepted given that all before it
    were. Returns ``[requests, K]`` float64, non-increasing along K and inside [0, 1]. A value that is NaN, infinite or
    outside [0, 1] ends its own request: from that position on its survival is 0. Other requests are not touched.
    """
    clean = np.array(confidence, dtype=np.float64, order="C")
    bad = _invalid(clean)
    if bad.any():
        clean[bad] = 0.0
    # One column after the other is faster than cumprod along a short last axis, and rounds the same way.
    for position in range(1, clean.shape[1]):
        clean[:, position] *= clean[:, position - 1]
    return clean


def count_invalid(confidence: Floats) -> int:
    """How many requests (rows of ``[requests, K]``) carry a value that ``survival`` had to contain."""
    return int(np.count_nonzero(_invalid(np.asarray(confidence)).any(axis=1)))
