"""How many tokens a step drafts: all K, or fewer where the drafter takes longer for them than they bring.

A block drafter's forward has K rows for each request. At many requests these rows cost as much as verifying, and the
deep ones are seldom verified there.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_adaptive.policy.rate import BUCKETS, RunningRate

# Confidences are up to two steps old: after so many wide steps on end all K of them are of wide drafts.
SETTLED_STEPS = 4
# While all K are drafted, one step in so many compares.
COMPARE_STEPS = 16
# So many steps with fewer, and SETTLED_STEPS with all K look whether that is still right; after each look that finds so
# twice as many, up to the most.
LOOK_STEPS, MOST_LOOK_STEPS = 256, 4096
ENTER_GAIN, LEAVE_GAIN = 0.01, 0.0


class DraftWidths:
    """The width that steps at each load (power of two of requests) draft with.

    ``widths`` are the ones besides K, each below K; with none of them everything is drafted. ``looks`` says of the step
    that was begun last that all K are drafted only to look. Steps are the only clock.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(sorted(widths))
        self._chosen = [0] * BUCKETS
        self._interval = [LOOK_STEPS] * BUCKETS
        self.looks = False
        self._bucket = 0
        self._wide = self._narrow = self._looks_left = 0

    def begin(self, requests: int, elapsed: int = 1) -> int:
        """The width of a step of R requests; 0 is K. The call before was ``elapsed`` steps ago."""
        if not self.widths:
            return 0
        # A look goes on at another load: a batch may go to and fro between two.
        self._bucket = bucket = RunningRate.bucket(requests)
        width = self._chosen[bucket]
        if width:
            self._narrow += elapsed
            if self._narrow > self._interval[bucket]:
                self._narrow, self._looks_left = 0, SETTLED_STEPS
            if self._looks_left:
                self._looks_left -= 1
                width = 0
        self.looks = width != self._chosen[bucket]
        self._wide = 0 if width else self._wide + 1
        return width

    def compares(self) -> bool:
        """Whether this step, which drafts all K, should be compared with narrower ones."""
        if not self.widths or self._wide < SETTLED_STEPS:
            return False
        looked = self.looks and not self._looks_left
        return looked or self._wide % COMPARE_STEPS == SETTLED_STEPS

    def choose(self, gains: Sequence[float]) -> int:
        """Take the best width from now on, and return it.

        ``gains`` are the predicted tokens per ms with each of ``widths`` over those with K, minus 1.
        """
        best = max(range(len(gains)), key=gains.__getitem__)
        before = self._chosen[self._bucket]
        needed = LEAVE_GAIN if before else ENTER_GAIN
        chosen = self._chosen[self._bucket] = self.widths[best] if gains[best] > needed else 0
        again = bool(chosen) and chosen == before
        self._interval[self._bucket] = min(2 * self._interval[self._bucket], MOST_LOOK_STEPS) if again else LOOK_STEPS
        self._looks_left = 0
        return chosen
