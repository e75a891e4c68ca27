"""How far confidences are from what verification finds, over the last few thousand steps of a server."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_adaptive.policy.calibration import Calibration
from sglang_adaptive.policy.logistic import logit, sigmoid

BINS = 10
# Each fold of steps weighs this much less than the one after it: a memory of about fifty folds.
_KEEP = 0.98


class CalibrationError:
    """Expected calibration error of the head's confidences and of those that the policy uses.

    ECE = sum over ten equal bins of |predicted - accepted| / all, over decided drafts: the accepted ones and the first
    rejected one of each request and step (Guo et al., 2017, arXiv 1706.04599). The policy's confidences are judged on
    steps that they have not learned from: with the calibration as it was when the fold before ended.
    """

    def __init__(self, gamma: int, calibration: Calibration | None = None) -> None:
        self._calibration = calibration
        self._coefficients = np.array([[0.0], [1.0]]).repeat(gamma, axis=1)
        # Drafts, sum of confidences, accepted: by bin of the head's and of the policy's confidence, and by position.
        self._bins = np.zeros((2, 3, BINS))
        self._positions = np.zeros((3, gamma))

    def observe(self, confidence: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> None:
        """Take a fold: raw ``confidence`` [N, K], drafts ``verified`` and of those ``accepted`` [N]."""
        position = np.arange(confidence.shape[1])
        raw = confidence.astype(np.float64)
        known = (position <= accepted[:, None]) & (position < verified[:, None]) & (raw >= 0.0) & (raw <= 1.0)
        hit = (position < accepted[:, None])[known]
        where = np.nonzero(known)[1]
        raw = raw[known]
        used = raw
        if self._calibration is not None:
            offset, slope = self._coefficients[:, where]
            used = sigmoid(offset + slope * logit(raw))
            self._coefficients = self._calibration.coefficients.copy()
        for bins, values in zip(self._bins, (raw, used), strict=True):
            self._add(bins, np.minimum((values * BINS).astype(np.int64), BINS - 1), values, hit)
        self._add(self._positions, where, used, hit)

    @staticmethod
    def _add(sums: np.ndarray, index: np.ndarray, values: np.ndarray, hit: np.ndarray) -> None:
        sums *= _KEEP
        for row, weights in zip(sums, (None, values, hit), strict=True):
            row += np.bincount(index, weights, minlength=row.size)

    def as_dict(self) -> dict[str, Any]:
        """``error`` and ``raw_error`` in 0..1 and ``bias_per_position`` (confidence minus acceptance), None without
        drafts; ``drafts`` is how many there are to judge by, older ones counting less."""
        raw, used = (_ece(*sums) for sums in self._bins)
        drafts, confidence, hits = self._positions
        bias = [float((c - h) / n) if n > 0 else None for n, c, h in zip(drafts, confidence, hits, strict=True)]
        return {"drafts": float(drafts.sum()), "error": used, "raw_error": raw, "bias_per_position": bias}


def _ece(drafts: np.ndarray, confidence: np.ndarray, hits: np.ndarray) -> float | None:
    total = drafts.sum()
    return float(np.abs(confidence - hits).sum() / total) if total > 0 else None
