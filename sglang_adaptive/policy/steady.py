"""Which steps may repeat the decision of the step before, because it has been the same for long.

Sizing a step and learning from it takes the CPU a few tenths of a millisecond, which a small model's step does not
hide. Where everything is verified, or nothing is drafted, step after step, one step in ``EVERY`` is sized and observed
and stands for the others. Only such decisions repeat: they depend on no confidence, so that requests may come and go.
"""

from __future__ import annotations

from sglang_adaptive.policy.budget import ALL_WORTH, LOW_LOAD, SMALL_GAIN, Decision
from sglang_adaptive.policy.rate import RunningRate
from sglang_adaptive.policy.saturation import SATURATED

EVERY = 8
STREAK = 64
WHOLE_IS_FASTER = "verify everything: a step that trims takes longer than the trim saves"
_REPEATABLE = frozenset((ALL_WORTH, LOW_LOAD, SMALL_GAIN, WHOLE_IS_FASTER, SATURATED))


class Steady:
    """Counts equal decisions. Steps are its only clock, so ranks that decide alike repeat alike.

    A load is a power of two of requests. After ``streak`` sized steps on end with one decision at one load, the next
    ``every`` - 1 steps at that load repeat it; then one is sized again, and goes on with the streak or ends it.
    """

    def __init__(self, every: int = EVERY, streak: int = STREAK) -> None:
        self._every, self._streak = every, streak
        self._state: tuple[bool, int] | None = None
        self._seen = 0
        self.left = self.repeated = 0

    def sized(self, decision: Decision, requests: int) -> None:
        """A step of R requests was sized. ``repeated`` counts the steps since then that were not."""
        self.repeated = 0
        repeatable = decision.reason in _REPEATABLE and (decision.uniform or not decision.draft)
        state = (decision.draft, RunningRate.bucket(requests)) if repeatable else None
        self._seen = self._seen + 1 if state is not None and state == self._state else 0
        self._state = state
        self.left = self._every - 1 if self._seen >= self._streak else 0

    def repeats(self, requests: int) -> bool:
        """Whether the next step, of R requests, may repeat the last sized decision; counts it if so."""
        if not self.left:
            return False
        if self._state is None or self._state[1] != RunningRate.bucket(requests):
            self._seen = self.left = 0
            return False
        self.left -= 1
        self.repeated += 1
        return True
