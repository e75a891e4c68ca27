"""Online calibration of a trained confidence head: p = sigmoid(offset_j + slope_j * logit(c_j)) per position j."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_adaptive.policy.logistic import LOGIT_LIMIT, LogisticFilter, logit
from sglang_adaptive.policy.survival import all_valid

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]

_LEAST = np.float32(1.0 / (1.0 + np.exp(LOGIT_LIMIT)))
_SLOPE_RANGE = (0.05, 4.0)
_OFFSET_LIMIT = 6.0
# As if a few dozen outcomes had already agreed with the head.
_PRIOR_PRECISION = (8.0, 16.0)


class Calibration:
    """The map, identity until a position has seen enough outcomes, and always increasing in the confidence."""

    def __init__(self, gamma: int) -> None:
        self._filter = LogisticFilter(gamma, np.array([0.0, 1.0]), np.array(_PRIOR_PRECISION))
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
    def is_identity(self) -> bool:
        self._refresh()
        return self._identity

    def apply(self, confidence: Floats) -> Floats:
        """[R, K] raw to [R, K] calibrated. Values that are NaN or outside [0, 1] pass through."""
        if self.is_identity:
            return confidence
        offset, slope = self._single
        # float32 is what the device computes in, and a third of the time; clipping c limits the log-odds to +-12.
        mapped = np.array(confidence, np.float32)
        np.clip(mapped, _LEAST, 1.0 - _LEAST, out=mapped)
        np.divide(mapped, 1.0 - mapped, out=mapped)
        np.log(mapped, out=mapped)
        mapped *= slope
        mapped += offset
        np.exp(np.negative(mapped, out=mapped), out=mapped)
        mapped += 1.0
        calibrated = 1.0 / mapped.astype(np.float64)
        if all_valid(confidence):
            return np.asarray(calibrated)
        return np.where((confidence >= 0.0) & (confidence <= 1.0), calibrated, confidence)

    def observe(self, confidence: Floats, verified: Ints, accepted: Ints) -> None:
        """Learn from one step: raw ``confidence`` [R, K], drafts ``verified`` [R] and of those ``accepted`` [R]."""
        if not self._filter.has_room:
            self._filter.observe_nothing()
            return
        raw = np.asarray(confidence, np.float64)
        inside = (raw >= 0.0) & (raw <= 1.0)
        odds = logit(np.where(inside, raw, np.nan))
        self._filter.observe(np.stack([np.ones_like(odds), odds], axis=2), verified, accepted)

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
        self._single = self._coefficients.astype(np.float32)
        self._identity = not offset.any() and bool((slope == 1.0).all())
        self._version = self._filter.version
