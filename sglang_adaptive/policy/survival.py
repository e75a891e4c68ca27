"""From confidences to survivals: the probability that a draft token is accepted together with all before it."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def bounds(confidence: Floats) -> tuple[float, float]:
    """The least and the largest value, NaN where there is one, without temporaries; 1 and 0 of nothing."""
    if not confidence.size:
        return 1.0, 0.0
    return float(np.minimum.reduce(confidence, axis=None)), float(np.maximum.reduce(confidence, axis=None))


def all_valid(confidence: Floats) -> bool:
    """True when every value is a number in [0, 1]."""
    least, largest = bounds(confidence)
    return least >= 0.0 and largest <= 1.0


def survival(confidence: Floats, *, valid: bool | None = None, in_place: bool = False) -> Floats:
    """Cumulative product along the draft positions.

    ``confidence`` is ``[requests, K]``, each the probability that a draft token is accepted given that all before it
    were. Returns ``[requests, K]`` float64, non-increasing along K and inside [0, 1]; in memory position by position. A
    value that is NaN, infinite or outside [0, 1] ends its own request: from that position on its survival is 0. Other
    requests are not touched. ``valid`` is ``all_valid(confidence)``, where the caller knows it. ``in_place``: the
    confidences are float64 and may be overwritten.
    """
    alive = confidence.T if in_place else np.array(confidence.T, dtype=np.float64, order="C")
    if not (all_valid(alive) if valid is None else valid):
        alive[~((alive >= 0.0) & (alive <= 1.0))] = 0.0
    # One position after the other is faster than an accumulate over either axis, and rounds the same way.
    so_far = None
    for position in alive:
        if so_far is not None:
            np.multiply(position, so_far, out=position)
        so_far = position
    return alive.T


def count_invalid(confidence: Floats) -> int:
    """How many requests (rows of ``[requests, K]``) carry a value that ``survival`` had to contain."""
    if all_valid(confidence):
        return 0
    return int(np.count_nonzero(~((confidence >= 0.0) & (confidence <= 1.0)).all(axis=1)))
