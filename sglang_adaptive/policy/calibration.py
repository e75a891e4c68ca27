"""Online calibration of a trained confidence head: p = sigmoid(offset_j + slope_j * logit(c_j)) per position j."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_adaptive.policy.gather import Gather
from sglang_adaptive.policy.logistic import LOGIT_LIMIT, LogisticFilter, logit
from sglang_adaptive.policy.survival import bounds

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]

_LEAST = np.float32(1.0 / (1.0 + np.exp(LOGIT_LIMIT)))
_MOST = 1.0 - _LEAST
_SLOPE_RANGE = (0.05, 4.0)
_OFFSET_LIMIT = 6.0
# As if a few dozen outcomes had already agreed with the head.
_PRIOR_PRECISION = (8.0, 16.0)


class Calibration:
    """The map, identity until a position has seen enough outcomes, and always increasing in the confidence."""

    def __init__(self, gamma: int) -> None:
        self._filter = LogisticFilter(gamma, np.array([0.0, 1.0]), np.array(_PRIOR_PRECISION))
        self._gather = Gather()
        self._version = -1
        self._refresh()

    @property
    def coefficients(self) -> Floats:
        """[2, K]: offset and slope per position, for the device side (``allocation.allocate``)."""
        self._refresh()
        return self._coefficients

    @property
    def version(self) -> int:
        """Changes whenever ``coefficients`` may have changed."""
        return self._filter.version

    @property
    def is_ready(self) -> bool:
        """Whether enough outcomes of first drafts were seen to correct their confidences."""
        return bool(self._filter.samples[0] >= self._filter.min_samples)

    @property
    def is_identity(self) -> bool:
        self._refresh()
        return self._identity

    def apply(self, confidence: Floats, *, within: tuple[float, float] | None = None) -> Floats:
        """[R, K] raw to [R, K] calibrated. Values that are NaN or outside [0, 1] pass through. ``within`` are the
        ``survival.bounds`` of the confidences, where the caller knows them."""
        if self.is_identity:
            return confidence
        least, largest = bounds(confidence) if within is None else within
        # float32 is what the device computes in, and a third of the time; clipping c limits the log-odds to +-12.
        mapped = np.array(confidence.T, np.float32, order="C")
        if not (least >= _LEAST and largest <= _MOST):
            np.maximum(mapped, _LEAST, out=mapped)
            np.minimum(mapped, _MOST, out=mapped)
        np.divide(mapped, 1.0 - mapped, out=mapped)
        np.log(mapped, out=mapped)
        mapped *= self._minus_slope
        mapped += self._minus_offset
        np.exp(mapped, out=mapped)
        mapped += 1.0
        exact = mapped.astype(np.float64)
        calibrated = np.reciprocal(exact, out=exact).T
        if least >= 0.0 and largest <= 1.0:
            return calibrated
        return np.where((confidence >= 0.0) & (confidence <= 1.0), calibrated, confidence)

    def observe(self, confidence: Floats, verified: Ints, accepted: Ints) -> None:
        """Learn from one step: raw ``confidence`` [R, K], drafts ``verified`` [R] and of those ``accepted`` [R].

        Steps of few requests wait for each other.
        """
        together = self._gather.add(confidence, verified, accepted)
        if together is None:
            return
        steps, (confidence, verified, accepted) = together
        if self._filter.has_room:
            raw = np.asarray(confidence, np.float64)
            inside = (raw >= 0.0) & (raw <= 1.0)
            odds = logit(np.where(inside, raw, np.nan))
            self._filter.observe(np.stack([np.ones_like(odds), odds], axis=2), verified, accepted, steps)
        else:
            self._filter.observe_nothing(steps)
        # Now, so that the sizing of the next step does not pay for it.
        self._refresh()

    def to_dict(self) -> dict[str, Any]:
        """What was learned, as plain JSON values."""
        return self._filter.to_dict()

    def load_dict(self, record: Mapping[str, Any]) -> None:
        """Take over a ``to_dict``; raises ``ValueError`` and changes nothing when it does not fit."""
        self._filter.load_dict(record)

    def _refresh(self) -> None:
        if self._version == self._filter.version:
            return
        offset, free_slope = self._filter.weights.T
        slope = np.clip(free_slope, *_SLOPE_RANGE)
        # A slope at its limit leaves the best offset for that slope.
        curvature = self._filter.curvature
        offset = offset - curvature[:, 0, 1] / curvature[:, 0, 0] * (slope - free_slope)
        offset = np.clip(offset, -_OFFSET_LIMIT, _OFFSET_LIMIT)
        self._coefficients = np.stack([offset, slope])
        # [K, 1], for values that lie position by position.
        self._minus_offset, self._minus_slope = -self._coefficients.astype(np.float32)[:, :, None]
        self._identity = not offset.any() and bool((slope == 1.0).all())
        self._version = self._filter.version
