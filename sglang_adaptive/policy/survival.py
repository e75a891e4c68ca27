"""From confidences to survivals: the probability that a draft token is accepted together with all before it."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def all_valid(confidence: Floats) -> bool:
    """True when every value is a number in [0, 1]; two passes without temporaries, for the usual case."""
    # NaN spreads through min and compares false.
    return not confidence.size or bool(confidence.min() >= 0.0 and confidence.max() <= 1.0)


def survival(confidence: Floats) -> Floats:
    """Cumulative product along the draft positions.

    ``confidence`` is ``[requests, K]``, each the probability that a draft token is accepted given that all before it
    were. Returns ``[requests, K]`` float64, non-increasing along K and inside [0, 1]. A value that is NaN, infinite or
    outside [0, 1] ends its own request: from that position on its survival is 0. Other requests are not touched.
    """
    alive = np.array(confidence, dtype=np.float64, order="C")
    if not all_valid(alive):
        alive[~((alive >= 0.0) & (alive <= 1.0))] = 0.0
    # One column after the other is faster than cumprod along a short last axis, and rounds the same way.
    for position in range(1, alive.shape[1]):
        alive[:, position] *= alive[:, position - 1]
    return alive


def count_invalid(confidence: Floats) -> int:
    """How many requests (rows of ``[requests, K]``) carry a value that ``survival`` had to contain."""
    if all_valid(confidence):
        return 0
    return int(np.count_nonzero(~((confidence >= 0.0) & (confidence <= 1.0)).all(axis=1)))
