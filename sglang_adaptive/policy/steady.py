"""Which steps may repeat the decision of the step before, because it has been the same for long.

Sizing a step and learning from it takes the CPU a few tenths of a millisecond, which a step does not hide where the
host is the slower one. Where everything is verified, or nothing is drafted, step after step, one step in ``EVERY`` is
sized and observed and stands for the others: such decisions depend on no confidence, so that requests may come and go.
Where steps are trimmed on end, one in ``EVERY_TRIM``: the batch's budget changes slowly, and who gets it is decided by
the confidences of each step, on the device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from sglang_adaptive.policy.budget import ALL_WORTH, LOW_LOAD, SMALL_GAIN, TRIMMED, Decision
from sglang_adaptive.policy.saturation import SATURATED

EVERY = 8
STREAK = 64
EVERY_TRIM = 4
STREAK_TRIM = 16
# Until so many steps were sized every one is learned from: a head may be off at the start.
LEARN_STEPS = 256
# A batch's size goes up and down by a few requests: that is one load, wherever it lies.
SAME_LOAD = 1.5
WHOLE_IS_FASTER = "verify everything: a step that trims takes longer than the trim saves"
_REPEATABLE = frozenset((ALL_WORTH, LOW_LOAD, SMALL_GAIN, WHOLE_IS_FASTER, SATURATED))


class Steady:
    """Counts equal decisions. Steps are its only clock, so ranks that decide alike repeat alike.

    Loads are alike within a factor of ``SAME_LOAD`` from the one that a streak began with. After ``streak`` sized steps
    on end with one decision at one load, the next ``every`` - 1 steps at that load repeat it; then one is sized again,
    and goes on with the streak or ends it. Steps that trim count as one decision whatever their budget, with
    ``streak_trim`` and ``every_trim`` (0 or 1 never repeats one) and not among the first ``learn_steps`` sized steps.
    """

    def __init__(
        self,
        every: int = EVERY,
        streak: int = STREAK,
        every_trim: int = EVERY_TRIM,
        streak_trim: int = STREAK_TRIM,
        learn_steps: int = LEARN_STEPS,
    ) -> None:
        self._every, self._streak, self._learn_steps = every, streak, learn_steps
        self.every_trim, self._streak_trim = every_trim, streak_trim
        self._state: tuple[bool, bool, int] | None = None
        self._requests = self._load = 0
        self._seen = self._sized = 0
        self.left = self.repeated = 0

    def sized(self, decision: Decision, requests: int) -> None:
        """A step of R requests was sized. ``repeated`` counts the steps since then that were not."""
        self.repeated = 0
        self._requests = requests
        self._sized += 1
        trimmed = decision.reason == TRIMMED and decision.draft and not decision.uniform
        repeatable = decision.reason in _REPEATABLE and (decision.uniform or not decision.draft)
        state = (decision.draft, trimmed, decision.width) if repeatable or trimmed else None
        if state is not None and state == self._state and self._is_same(requests):
            self._seen += 1
        else:
            self._seen, self._load = 0, requests
        self._state = state
        every, streak = (self.every_trim, self._streak_trim) if trimmed else (self._every, self._streak)
        learned = not trimmed or self._sized >= self._learn_steps
        self.left = max(every - 1, 0) if learned and self._seen >= streak else 0

    def repeats(self, requests: int) -> bool:
        """Whether the next step, of R requests, may repeat the last sized decision; counts it if so."""
        if not self.left:
            return False
        if not self._is_same(requests):
            self._seen = self.left = 0
            return False
        self.left -= 1
        self.repeated += 1
        return True

    def _is_same(self, requests: int) -> bool:
        return self._load <= requests * SAME_LOAD and requests <= self._load * SAME_LOAD

    def again(
        self,
        decision: Decision,
        requests: int,
        gamma: int,
        tiers: Sequence[int],
        least: int = 0,
        most: int | None = None,
    ) -> Decision:
        """The sized ``decision`` for the R requests of a step that repeats it; ``gamma`` is K.

        Of a trim as many tokens per request, in the nearest of ``tiers`` (ascending; tokens up to a tier's edge are
        free) that the batch can fill with ``least`` to ``most`` drafts (K if None) of each request.
        """
        if decision.reason != TRIMMED or requests == self._requests:
            return decision.for_requests(requests, gamma)
        tokens = requests + round(decision.budget * requests / self._requests)
        place = bisect_left(tiers, tokens)
        if 0 < place < len(tiers) and tokens - tiers[place - 1] < tiers[place] - tokens:
            place -= 1
        if place < len(tiers):
            tokens = tiers[place]
        most = gamma if most is None else most
        budget = min(max(tokens - requests, requests * least), requests * most)
        if budget == requests * gamma:
            return Decision(budget, True, True, 0.0, 0.0, decision.reason)
        return decision.with_budget(budget)
