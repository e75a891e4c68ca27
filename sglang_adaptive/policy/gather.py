"""Small steps are learned from together: the arithmetic of one costs the same for one request as for a hundred."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS = 64
STEPS = 16


class Gather:
    """Collects arrays of steps until they have ``rows`` rows, or there are ``steps`` of them.

    Counts only, so ranks that see the same steps learn at the same ones.
    """

    def __init__(self, rows: int = ROWS, steps: int = STEPS) -> None:
        self._rows, self._steps = rows, steps
        self._waiting: list[tuple[NDArray[Any], ...]] = []
        self._count = 0

    def add(self, *arrays: NDArray[Any]) -> tuple[int, tuple[NDArray[Any], ...]] | None:
        """Take one step's arrays, all with R rows. Once it is enough: how many steps waited, and their arrays, those of
        one step below those of the one before."""
        self._waiting.append(arrays)
        self._count += len(arrays[0])
        if self._count < self._rows and len(self._waiting) < self._steps:
            return None
        waiting, self._waiting, self._count = self._waiting, [], 0
        if len(waiting) == 1:
            return 1, arrays
        return len(waiting), tuple(np.concatenate(column) for column in zip(*waiting, strict=True))
