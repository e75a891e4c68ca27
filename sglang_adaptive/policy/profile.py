"""The typical survival per draft position: what is believed of requests that show no confidences."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_NEWS = 0.1
_TRUSTED_REQUESTS = 16


class SurvivalProfile:
    """Slow mean over the requests of the steps that drafted; ``mean`` [K] is None until one was seen."""

    def __init__(self) -> None:
        self.mean: Floats | None = None

    def observe(self, alive: Floats, rare: bool) -> None:
        """Take the survivals ``alive`` of a step, [R, K] or, once a step with K was seen, of fewer positions: further
        ones then survive those as often as before. When steps that draft are ``rare``, as in a short probe, each
        counts the more, the more requests it has."""
        requests = alive.shape[0]
        if not requests:
            return
        mean = alive.mean(axis=0)
        if self.mean is None:
            self.mean = mean
            return
        narrow = mean.size
        if narrow < self.mean.size:
            share = mean[-1] / max(float(self.mean[narrow - 1]), 1e-9)
            mean = np.concatenate([mean, np.minimum(self.mean[narrow:] * share, mean[-1])])
        news = requests / (requests + _TRUSTED_REQUESTS) if rare else _NEWS
        self.mean = self.mean + news * (mean - self.mean)
