"""How many tokens a step drafts: all K, or fewer where the drafter takes longer for them than they bring.

A block drafter's forward has K rows for each request. At many requests these rows cost as much as verifying, and the
deep ones are seldom verified there.

What a width brings is predicted from confidences at first. But a step that cuts a long run off leaves an easy text to
the next one, so that shorter drafts bring more than the confidences of steps with K say: once both were seen for a
while, what they brought counts. What was seen may be old, so the other width is tried again now and then.
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
# A trial takes so many steps. One of fewer tokens is worth it where they are predicted to lose no more than this, one
# of all K where fewer are predicted to lose anything, and at once where that is more than this. At few requests it
# takes longer: TRIAL_ROWS requests' steps say what a step brings to 2 %.
TRIAL_STEPS, TRIAL_ROWS, TRIAL_LOSS = 48, 2048, 0.08
# The first trial of the other width comes after so many steps, the next one after four times as many, up to the most.
FIRST_TRIAL, MOST_TRIAL = 64, 16384
# Steps that the mean of what was brought remembers, that it needs, and that it leaves out after another width; and
# requests' steps that it remembers and needs, at least.
_MEMORY_STEPS, _LEAST_STEPS, _TURN_STEPS = 64, 16, 4
_MEMORY_ROWS, _LEAST_ROWS = 8192, 1024


class DraftWidths:
    """The width that steps at each load (power of two of requests) draft with.

    ``widths`` are the ones besides K, each below K; with none of them everything is drafted. ``looks`` says of the step
    that was begun last that all K are drafted only to look. Steps are the only clock, and what ``observe`` is told is
    the same on all ranks.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(sorted(widths))
        self._loads = [_Load(len(self.widths) + 1) for _ in range(BUCKETS)]
        self._load = self._loads[0]
        self.looks = False
        self._wide = self._requests = 0

    def begin(self, requests: int, elapsed: int = 1) -> int:
        """The width of a step of R requests; 0 is K. The call before was ``elapsed`` steps ago."""
        if not self.widths:
            return 0
        self._load, self._requests = self._loads[RunningRate.bucket(requests)], requests
        load = self._load
        load.since += elapsed
        width = load.width
        if width:
            load.unlooked += elapsed
            if load.unlooked > load.interval:
                load.unlooked, load.looks_left = 0, SETTLED_STEPS
            if load.looks_left:
                load.looks_left -= 1
                width = 0
        self.looks = width != load.width
        self._wide = 0 if width else self._wide + 1
        return width

    def compares(self) -> bool:
        """Whether this step, which drafts all K, should be compared with narrower ones."""
        if not self.widths or self._wide < SETTLED_STEPS:
            return False
        looked = self.looks and not self._load.looks_left
        return looked or self._wide % COMPARE_STEPS == SETTLED_STEPS

    def observe(self, requests: int, committed_tokens: int, width: int) -> None:
        """Count what a step that drafted ``width`` tokens (0: K) for each of R requests brought."""
        if self.widths and requests:
            self._loads[RunningRate.bucket(requests)].observe(self._place(width), requests, committed_tokens)

    def brought(self, width: int) -> float:
        """Tokens per request and step of ``width`` (0: K) at the load of this step; 0 where that is not known."""
        return self._load.known(self._place(width))

    def choose(self, gains: Sequence[float], predicted: Sequence[float], gating: bool = False) -> int:
        """Take the best width from now on, and return it.

        ``gains`` are the tokens per ms with each of ``widths`` over those with K, minus 1, as far as is known; those
        ``predicted`` say what is worth a trial, since what was known once may be old. None is tried while ``gating``.
        """
        load = self._load
        before, load.looks_left = load.width, 0
        best = max(range(len(gains)), key=gains.__getitem__)
        hoped = max(range(len(predicted)), key=predicted.__getitem__)
        if gains[best] > (LEAVE_GAIN if before else ENTER_GAIN):
            width = self.widths[best]
            if width == before:
                load.interval = min(2 * load.interval, MOST_LOOK_STEPS)
                loses = predicted[hoped] <= LEAVE_GAIN and load.since > load.trial_after
                if not gating and (loses or predicted[hoped] < -TRIAL_LOSS):
                    width = 0
                    load.begin_trial(self._place(0))
            else:
                load.interval = LOOK_STEPS
        elif not before and not gating and load.since > load.trial_after and predicted[hoped] > -TRIAL_LOSS:
            width = self.widths[hoped]
            load.interval = max(TRIAL_STEPS, TRIAL_ROWS // max(self._requests, 1))
            load.begin_trial(self._place(width))
        else:
            width = 0
        load.take(width)
        return width

    def _place(self, width: int) -> int:
        return self.widths.index(width) + 1 if width else 0


class _Load:
    """What is known at one load. A place is 0 for K, else 1 + that of the width."""

    def __init__(self, places: int) -> None:
        self.width = 0
        # Steps since that was taken, and with fewer than K since the last look.
        self.since = self.unlooked = self.looks_left = 0
        self.interval, self.trial_after = LOOK_STEPS, FIRST_TRIAL
        self._brought: NDArray[np.float64] = np.zeros(places)
        self._steps, self._rows = np.zeros(places, np.int64), np.zeros(places, np.int64)
        self._turn = (0, 0)

    def take(self, width: int) -> None:
        if width != self.width:
            self.width, self.since, self.unlooked = width, 0, 0

    def begin_trial(self, place: int) -> None:
        """What was known of that place may be old."""
        self._steps[place] = self._rows[place] = 0
        self.trial_after = min(4 * self.trial_after, MOST_TRIAL)

    def observe(self, place: int, requests: int, tokens: int) -> None:
        before, steps = self._turn
        self._turn = (place, steps + 1 if place == before else 1)
        if self._turn[1] <= _TURN_STEPS:
            return
        self._steps[place] += 1
        self._rows[place] += requests
        memory = min(int(self._steps[place]), max(_MEMORY_STEPS, _MEMORY_ROWS // requests))
        self._brought[place] += (tokens / requests - self._brought[place]) / memory

    def known(self, place: int) -> float:
        enough = self._steps[place] >= _LEAST_STEPS and self._rows[place] >= _LEAST_ROWS
        return float(self._brought[place]) if enough else 0.0
