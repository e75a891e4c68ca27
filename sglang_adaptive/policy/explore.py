"""Trying, now and then, graph tiers that look worse than the best one, because only measured tiers can be corrected."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# A little more than a correction needs, since the clock does not run in every step.
BURST_STEPS = 10
_FIRST_INTERVAL = 32
_LEAST_VALUE = 0.8
# A burst may cost this share of the steps since the one before it.
_PRICE = 0.01
_HALVINGS = 4
_BUCKETS = 24


class TierExplorer:
    """A table that is wrong about the tiers it never uses stays wrong: in particular one that is falsely flat makes
    everything be verified. So a burst of steps goes to a tier between the current one and the fewest (or, in turn, the
    most) tokens the batch could verify: halfway in log tokens, nearer while that looks too dear (a hundredth of the
    steps since the last burst, and never more than a fifth of each step). A tier that was used lately is known and left
    alone.

    The first burst comes after 32 steps at a load (power of two of requests), the next one after twice as many, and so
    on up to ``longest_interval``: in the long run at most a fifth of 10 steps per interval is lost. Steps and decisions
    are its only inputs, so all ranks explore alike.
    """

    def __init__(self, tiers: Ints, longest_interval: int, forget_steps: int) -> None:
        # Lists: one item of an array at a time is several times slower.
        self.tiers: list[int] = tiers.tolist()
        self.longest, self.forget = longest_interval, forget_steps
        self._uses, self._used_at = [0] * len(self.tiers), [0] * len(self.tiers)
        self._interval = [min(_FIRST_INTERVAL, max(longest_interval, 1))] * _BUCKETS
        self._waited = [0] * _BUCKETS
        self._steps = 0
        self._down = False
        self._burst_left = 0
        self._burst_tokens = 0

    def tokens(self, tokens: int, least: int, most: int, worth: Callable[[int], float], elapsed: int = 1) -> int:
        """What this step should verify where ``tokens`` is best and ``least`` to ``most`` are possible, ``elapsed``
        steps after the call before.

        ``worth`` says, for a number of tokens, the predicted tokens per ms relative to the best.
        """
        self._steps += elapsed
        chosen = tokens
        if self._burst_left and least <= self._burst_tokens <= most:
            self._burst_left -= 1
            chosen = self._burst_tokens
        else:
            self._burst_left = 0
            bucket = min(least.bit_length(), _BUCKETS - 1)
            self._waited[bucket] += elapsed
            if self._waited[bucket] >= self._interval[bucket]:
                affordable = 1.0 - _PRICE * self._waited[bucket] / BURST_STEPS
                self._waited[bucket] = 0
                self._interval[bucket] = min(2 * self._interval[bucket], self.longest)
                chosen = self._unknown(tokens, least, most, worth, max(affordable, _LEAST_VALUE))
                self._burst_tokens, self._burst_left = chosen, BURST_STEPS - 1 if chosen != tokens else 0
        self._use(chosen)
        return chosen

    def _unknown(self, tokens: int, least: int, most: int, worth: Callable[[int], float], least_value: float) -> int:
        for _ in range(2):
            self._down = not self._down
            away = float(least if self._down else most)
            for _ in range(_HALVINGS):
                away = (away * tokens) ** 0.5
                there = self.tiers[self._held_by(math.ceil(away))]
                if not least <= there <= most or self._tier(there) == self._tier(tokens):
                    break
                if worth(there) >= least_value:
                    if self._is_known(there):
                        break
                    return there
        return tokens

    def _tier(self, tokens: int) -> int:
        return bisect_left(self.tiers, tokens)

    def _held_by(self, tokens: int) -> int:
        """The tier's place; tokens beyond the table count for its last tier."""
        return min(bisect_left(self.tiers, tokens), len(self.tiers) - 1)

    def _is_known(self, tokens: int) -> bool:
        tier = self._held_by(tokens)
        return self._uses[tier] >= BURST_STEPS and self._steps - self._used_at[tier] <= self.forget

    def _use(self, tokens: int) -> None:
        tier = self._held_by(tokens)
        if self._steps - self._used_at[tier] > self.forget:
            self._uses[tier] = 0
        self._uses[tier] += 1
        self._used_at[tier] = self._steps
