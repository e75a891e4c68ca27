"""What a step without a draft, one that verifies everything and one that trims really take, to choose between them.

A step has host work between its graphs that no profile of the device sees. A drafting step has several times as much of
it as a plain one, and one that trims half as much again as one that verifies everything, since its rows are packed. The
correction of the cost table cannot tell them apart: all use the same tiers, and it never lets more tokens cost less. So
the measured time is compared with the profiled one for each mode on its own, and a mode that is never chosen is looked
at now and then.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sglang_adaptive.policy.rate import BUCKETS, RunningRate

Floats = NDArray[np.float64]

WINDOW = 16
MIN_SAMPLES = 6
_FACTOR_RANGE = (0.05, 50.0)
# More than half a window, so that a look replaces what an older one saw.
LOOK_STEPS = 12
_FIRST_INTERVAL = 32
PRICE = 0.002
# As many requests' next tokens weigh as much as all before them when the advantage of drafting is averaged.
_CALM_REQUESTS = 32
PLAIN, WHOLE, TRIMMED, NARROW_WHOLE, NARROW_TRIMMED = range(5)
MODES = 5
SIZE = MODES * BUCKETS


def mode_of(drafted: bool, uniform: bool, width: int = 0) -> int:
    """PLAIN without a draft, WHOLE where everything that was drafted is verified, else TRIMMED; the latter two apart
    where ``width`` tokens, fewer than K, were drafted."""
    if not drafted:
        return PLAIN
    if width:
        return NARROW_WHOLE if uniform else NARROW_TRIMMED
    return WHOLE if uniform else TRIMMED


class ModeTimes:
    """Lower quartiles of measured over profiled step times, by mode and power of two of requests.

    A step is never faster than it can be, but often slower: after a prefill, or where the host was busy.
    """

    def __init__(self) -> None:
        self._ratios = np.zeros((MODES, BUCKETS, WINDOW))
        self._count = np.zeros((MODES, BUCKETS), np.int64)

    def observe(self, requests: int, mode: int, step_ms: float, profiled_ms: float) -> None:
        """Count one step. Times that are not finite or not positive are dropped."""
        if not (np.isfinite(step_ms) and step_ms > 0 and profiled_ms > 0) or requests <= 0:
            return
        bucket = RunningRate.bucket(requests)
        self._ratios[mode, bucket, self._count[mode, bucket] % WINDOW] = step_ms / profiled_ms
        self._count[mode, bucket] += 1

    def state(self) -> Floats:
        """[``SIZE``] factors by mode and load; 0 where too few steps were seen."""
        factors = np.zeros((MODES, BUCKETS))
        for mode, bucket in np.argwhere(self._count >= MIN_SAMPLES):
            seen = min(int(self._count[mode, bucket]), WINDOW)
            factors[mode, bucket] = np.clip(np.quantile(self._ratios[mode, bucket, :seen], 0.25), *_FACTOR_RANGE)
        return factors.reshape(-1)


def factors(state: list[float], requests: int) -> list[float]:
    """The factors of a ``ModeTimes.state`` for a batch, by mode; 0 where one is not known."""
    return state[RunningRate.bucket(requests) :: BUCKETS]


class Look:
    """Decides when ``LOOK_STEPS`` steps are taken in another mode than the chosen one, to learn what they take.

    At a load (power of two of requests) the first look comes after 32 steps in the chosen mode, the next after twice as
    many, and so on up to ``longest_interval``; 0 never looks. A look also waits until what it is expected to cost is no
    more than ``PRICE`` of the steps since the last one. Where the chosen mode is clearly better that is long; where the
    measured times put it in doubt, a look costs next to nothing and comes early. Steps are its only clock.
    """

    def __init__(self, longest_interval: int) -> None:
        self.longest = longest_interval
        # Lists: one item of an array at a time is several times slower.
        self._interval = [min(_FIRST_INTERVAL, max(longest_interval, 1))] * BUCKETS
        self._waited = [0] * BUCKETS
        self._level = [0.0] * BUCKETS
        self._left = 0
        self._bucket = -1

    def due(self, requests: int, advantage: float, elapsed: int = 1) -> bool:
        """Whether this step should be one of the other mode; called in the chosen one, ``elapsed`` steps after the call
        before. ``advantage`` of the chosen mode: its tokens per ms over those of the other, as far as is known."""
        if not self.longest or not advantage > 0:
            return False
        bucket = RunningRate.bucket(requests)
        if self._left and bucket == self._bucket:
            self._left -= 1
            return True
        self._left = 0
        first = not self._waited[bucket]
        self._waited[bucket] += elapsed
        weight = 1.0 if first else requests / (requests + _CALM_REQUESTS)
        self._level[bucket] += weight * (math.log(advantage) - self._level[bucket])
        price = LOOK_STEPS * (1.0 - math.exp(-max(0.0, self._level[bucket])))
        if self._waited[bucket] <= self._interval[bucket] or price > PRICE * self._waited[bucket]:
            return False
        self._waited[bucket] = 0
        self._interval[bucket] = min(2 * self._interval[bucket], self.longest)
        self._bucket, self._left = bucket, LOOK_STEPS - 1
        return True
