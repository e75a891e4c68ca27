"""Small statistics that the load generator and the report share."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], q: float) -> float | None:
    """The ``q``-th percentile (0..100) with linear interpolation; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def percentiles(values: Sequence[float], scale: float = 1.0) -> dict[str, float | None]:
    """p50, p90 and p99 of ``values * scale``, and how many values there were."""
    scaled = [value * scale for value in values]
    return {"n": len(scaled), **{f"p{q}": percentile(scaled, q) for q in (50, 90, 99)}}


def median(values: Sequence[float]) -> float | None:
    """The middle value; None of nothing."""
    return percentile(values, 50)


def spread(values: Sequence[float]) -> float | None:
    """Half the range over the median, as a fraction; None for fewer than two values or a median of 0."""
    middle = median(values)
    if len(values) < 2 or not middle:
        return None
    return (max(values) - min(values)) / 2 / middle


def geomean(values: Sequence[float]) -> float | None:
    """Geometric mean of positive numbers; None of nothing."""
    if not values:
        return None
    return math.exp(sum(map(math.log, values)) / len(values))


def ratio(above: float | None, below: float | None) -> float | None:
    """``above / below``, or None where either is missing or ``below`` is 0."""
    return above / below if above is not None and below else None
