"""A request's own recent acceptance, keyed by request slot and generation, never by the batch row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]

_KEEP = 0.9
_BELIEF = 4.0
_LEAST_RATE = 1e-5


class AcceptanceHistory:
    """Exponentially forgotten counts of drafts decided (accepted, or the first rejected) and accepted, per slot."""

    def __init__(self, slots: int) -> None:
        self._generation = np.full(slots, -1, np.int64)
        self._accepted = np.zeros(slots)
        self._decided = np.zeros(slots)
        self._all_accepted, self._all_decided = 0.5, 1.0

    def observe(self, slots: Ints, generations: Ints, verified: Ints, accepted: Ints) -> None:
        """Count one step; ``slots`` [R] are distinct. A slot whose generation changed starts anew."""
        self._forget_previous_owner(slots, generations)
        decided = np.minimum(accepted + 1, verified)
        self._accepted[slots] = _KEEP * self._accepted[slots] + accepted
        self._decided[slots] = _KEEP * self._decided[slots] + decided
        self._all_accepted = 0.999 * self._all_accepted + float(accepted.sum())
        self._all_decided = 0.999 * self._all_decided + float(decided.sum())

    def relative(self, slots: Ints, generations: Ints) -> Floats:
        """[R] log-odds of the request's acceptance minus those of all requests; 0 for a request without history."""
        average = min(max(self._all_accepted / self._all_decided, _LEAST_RATE), 1.0 - _LEAST_RATE)
        mine = self._generation[slots] == generations
        accepted = mine * self._accepted[slots] + _BELIEF * average
        decided = mine * self._decided[slots] + _BELIEF
        return np.asarray(np.log(accepted / (decided - accepted)) - np.log(average / (1.0 - average)))

    def _forget_previous_owner(self, slots: Ints, generations: Ints) -> None:
        others = self._generation[slots] != generations
        if not others.any():
            return
        new = slots[others]
        self._accepted[new] = 0.0
        self._decided[new] = 0.0
        self._generation[slots] = generations
