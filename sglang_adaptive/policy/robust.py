"""Medians that a few wild timings cannot move."""

import numpy as np
from numpy.typing import NDArray

_MAD_TO_SIGMA = 1.4826
_REJECT_SIGMAS = 3.0


def robust_median(values: NDArray[np.float64]) -> float:
    """Median of ``values`` [n >= 1] after dropping those more than three robust deviations away from the median."""
    center = float(np.median(values))
    spread = _MAD_TO_SIGMA * float(np.median(np.abs(values - center)))
    if spread == 0.0:
        return center
    return float(np.median(values[np.abs(values - center) <= _REJECT_SIGMAS * spread]))
