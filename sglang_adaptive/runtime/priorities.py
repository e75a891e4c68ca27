"""Weights of requests from the host's request priority."""

from __future__ import annotations

from typing import Any

import numpy as np


class Priorities:
    """A request's tokens weigh ``1 + weight`` times as much for each step of priority above none, eight at most."""

    def __init__(self, weight: float, low_values_first: bool) -> None:
        self._base, self._sign = 1.0 + weight, -1 if low_values_first else 1

    def weights(self, requests: list[Any]) -> np.ndarray | None:
        """[R] float64 > 0; None where no request has a priority."""
        values = np.fromiter((request.priority or 0 for request in requests), np.float64, len(requests))
        return self._base ** np.clip(self._sign * values, -8, 8) if values.any() else None
