"""How many tokens a step drafts: all K, or fewer where the drafter takes longer for them than they bring.

A block drafter's forward has K rows for each request. At many requests these rows cost as much as verifying, and the
deep ones are seldom verified there.

What a width brings is predicted from confidences at first. But a step that cuts a long run off leaves an easy text to
the next one, so that shorter drafts bring more than the confidences of steps with K say: once both were seen for a
while, what they brought counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_adaptive.policy.rate import BUCKETS, RunningRate

# Confidences are up to two steps old: after so many wide steps on end all K of them are of wide drafts.
SETTLED_STEPS = 4
# While all K are drafted, one step in so many compares.
COMPARE_STEPS = 16
# So many steps with fewer, and SETTLED_STEPS with all K look whether that is still right; after each look that finds so
# twice as many, up to the most.
LOOK_STEPS, MOST_LOOK_STEPS = 256, 1024
ENTER_GAIN, LEAVE_GAIN = 0.01, 0.0
# A width that is predicted to lose no more than this is tried for so many steps: the first time after so many with K,
# then after four times as many each time, up to the most.
TRIAL_LOSS, TRIAL_STEPS = 0.08, 48
FIRST_TRIAL, MOST_TRIAL = 64, 16384
# Steps that the mean of what was brought remembers, that it needs, and that it leaves out after another width.
_MEMORY_STEPS, _LEAST_STEPS, _TURN_STEPS = 64, 16, 4


class DraftWidths:
    """The width that steps at each load (power of two of requests) draft with.

    ``widths`` are the ones besides K, each below K; with none of them everything is drafted. ``looks`` says of the step
    that was begun last that all K are drafted only to look. Steps are the only clock, and what ``observe`` is told is
    the same on all ranks.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(sorted(widths))
        self._chosen = [0] * BUCKETS
        self._interval = [LOOK_STEPS] * BUCKETS
        self._trial_after = [FIRST_TRIAL] * BUCKETS
        self._untried = [0] * BUCKETS
        self.looks = False
        self._bucket = 0
        self._wide = self._narrow = self._looks_left = 0
        self._brought: NDArray[np.float64] = np.zeros((BUCKETS, len(self.widths) + 1))
        self._seen = np.zeros((BUCKETS, len(self.widths) + 1), np.int64)
        self._turn: tuple[int, int] = (0, 0)

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
        else:
            self._untried[bucket] += elapsed
        self.looks = width != self._chosen[bucket]
        self._wide = 0 if width else self._wide + 1
        return width

    def compares(self) -> bool:
        """Whether this step, which drafts all K, should be compared with narrower ones."""
        if not self.widths or self._wide < SETTLED_STEPS:
            return False
        looked = self.looks and not self._looks_left
        return looked or self._wide % COMPARE_STEPS == SETTLED_STEPS

    def observe(self, requests: int, committed_tokens: int, width: int) -> None:
        """Count what a step that drafted ``width`` tokens (0: K) for each of R requests brought."""
        if not self.widths or not requests:
            return
        before, steps = self._turn
        self._turn = (width, steps + 1 if width == before else 1)
        if self._turn[1] <= _TURN_STEPS:
            return
        at = RunningRate.bucket(requests), self._place(width)
        self._seen[at] += 1
        share = 1.0 / min(int(self._seen[at]), _MEMORY_STEPS)
        self._brought[at] += share * (committed_tokens / requests - self._brought[at])

    def brought(self, width: int) -> float:
        """Tokens per request and step of ``width`` (0: K) at the load of this step; 0 where that is not known."""
        at = self._bucket, self._place(width)
        return float(self._brought[at]) if self._seen[at] >= _LEAST_STEPS else 0.0

    def choose(self, gains: Sequence[float], predicted: Sequence[float], gating: bool = False) -> int:
        """Take the best width from now on, and return it.

        ``gains`` are the tokens per ms with each of ``widths`` over those with K, minus 1, as far as is known; those
        ``predicted`` say what is worth a trial, since what was known once may be old. None is tried while ``gating``.
        """
        bucket = self._bucket
        best = max(range(len(gains)), key=gains.__getitem__)
        width, gain, before = self.widths[best], gains[best], self._chosen[bucket]
        self._looks_left = 0
        if gain > (LEAVE_GAIN if before else ENTER_GAIN):
            again = width == before
            self._interval[bucket] = min(2 * self._interval[bucket], MOST_LOOK_STEPS) if again else LOOK_STEPS
        elif self._is_due(predicted) and not before and not gating:
            width = self.widths[max(range(len(predicted)), key=predicted.__getitem__)]
            self._trial_after[bucket] = min(4 * self._trial_after[bucket], MOST_TRIAL)
            self._interval[bucket] = TRIAL_STEPS
        else:
            width = 0
        if not before:
            self._narrow = 0
        if not width and before:
            self._untried[bucket] = 0
        self._chosen[bucket] = width
        return width

    def _is_due(self, predicted: Sequence[float]) -> bool:
        due = self._untried[self._bucket] > self._trial_after[self._bucket]
        return due and max(predicted) > -TRIAL_LOSS

    def _place(self, width: int) -> int:
        return self.widths.index(width) + 1 if width else 0
