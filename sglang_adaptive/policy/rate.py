"""The long-run rate, in tokens per ms, that a step must beat: lambda of renewal-reward theory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MEMORY_STEPS = 256.0
_MIN_STEPS = 32.0
_MAX_SLOWDOWN = 4.0
BUCKETS = 16
_MOST_REQUESTS = 1 << (BUCKETS - 1)


class RunningRate:
    """Committed tokens over measured ms, with exponential forgetting, one rate per power of two of requests.

    The rate of a batch of 256 says nothing about a batch of one, hence the buckets. One step counts at most
    ``_MAX_SLOWDOWN`` times its predicted ms: a preempted step is no news about the load.
    """

    def __init__(self) -> None:
        self._tokens = np.zeros(BUCKETS)
        self._ms = np.zeros(BUCKETS)
        self._steps = np.zeros(BUCKETS)

    def observe(self, requests: int, committed_tokens: int, step_ms: float, predicted_ms: float) -> None:
        """Count one step. Times that are not finite or not positive are dropped."""
        if not (np.isfinite(step_ms) and step_ms > 0) or requests <= 0:
            return
        bucket, keep = self.bucket(requests), 1.0 - 1.0 / _MEMORY_STEPS
        ms = min(step_ms, _MAX_SLOWDOWN * predicted_ms) if predicted_ms > 0 else step_ms
        self._tokens[bucket] = keep * self._tokens[bucket] + committed_tokens
        self._ms[bucket] = keep * self._ms[bucket] + ms
        self._steps[bucket] = keep * self._steps[bucket] + 1.0

    def rates(self) -> NDArray[np.float64]:
        """[BUCKETS] tokens per ms; 0 where too few steps were seen."""
        known = self._steps >= _MIN_STEPS
        return np.where(known, self._tokens / np.where(known, self._ms, 1.0), 0.0)

    @staticmethod
    def bucket(requests: int) -> int:
        return requests.bit_length() - 1 if 0 < requests < _MOST_REQUESTS else BUCKETS - 1 if requests > 0 else 0
