"""Confidences against what verification found, before and after the online calibration, on a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_adaptive.policy.calibration import Calibration
from sglang_adaptive.runtime.trace_reader import Trace

BINS = 10
MOST_STEPS = 20_000
# As many steps as the server lets pass before it uses what it has learned.
_BLOCK = 16


@dataclass(frozen=True)
class Curve:
    """[K, BINS] by position and bin of the confidence: decided drafts, mean confidence and share accepted, the last
    two NaN where there are none; [K] and overall expected calibration error."""

    count: np.ndarray
    confidence: np.ndarray
    accepted: np.ndarray
    error: np.ndarray
    overall: float


@dataclass(frozen=True)
class Reliability:
    """Decided drafts only: the accepted ones, and the first rejected one of each request and step. ``steps`` were
    looked at, the last ones of the trace; None where none of them drafted."""

    steps: int
    raw: Curve | None
    online: Curve | None


def reliability(trace: Trace) -> Reliability:
    """Learn the calibration again as the server does; every step is judged before it is learned from."""
    gamma = trace.gamma
    first = max(0, len(trace.steps) - MOST_STEPS)
    calibration = Calibration(gamma)
    position = np.arange(gamma)
    sums = np.zeros((2, 3, gamma * BINS))
    looked_at = 0
    for block in range(first, len(trace.steps), _BLOCK):
        edges = trace.start[block : block + _BLOCK + 1]
        begin, end = edges[0], edges[-1]
        raw = trace.confidence[begin:end].astype(np.float64)
        verified, accepted = (trace.rows[name][begin:end].astype(np.int64) for name in ("verified", "accepted"))
        online = calibration.apply(raw)
        for one, after in zip(edges[:-1] - begin, edges[1:] - begin, strict=True):
            if np.isfinite(raw[one:after]).any():
                looked_at += 1
                calibration.observe(raw[one:after], verified[one:after], accepted[one:after])
        known = (position <= accepted[:, None]) & (position < verified[:, None]) & (raw >= 0) & (raw <= 1)
        where, hit = np.nonzero(known)[1], (position < accepted[:, None])[known]
        for side, values in zip(sums, (raw[known], online[known]), strict=True):
            cell = where * BINS + np.minimum((values * BINS).astype(np.int64), BINS - 1)
            for row, weights in zip(side, (None, values, hit), strict=True):
                row += np.bincount(cell, weights, minlength=row.size)
    if not sums[0, 0].any():
        return Reliability(looked_at, None, None)
    return Reliability(looked_at, *(_curve(side.reshape(3, gamma, BINS)) for side in sums))


def _curve(sums: np.ndarray) -> Curve:
    count, confidence, hits = sums
    gap = np.abs(confidence - hits)
    overall = np.abs(confidence.sum(axis=0) - hits.sum(axis=0)).sum() / count.sum()
    with np.errstate(invalid="ignore", divide="ignore"):
        return Curve(
            count,
            confidence / count,
            hits / count,
            gap.sum(axis=1) / count.sum(axis=1),
            float(overall),
        )
