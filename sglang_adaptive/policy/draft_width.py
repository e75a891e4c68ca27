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
# So many steps with fewer, and SETTLED_STEPS with all K look whether that is still right.
LOOK_STEPS = 256
ENTER_GAIN, LEAVE_GAIN = 0.01, 0.0


class DraftWidths:
    """The width that steps at each load (power of two of requests) draft with.

    ``widths`` are the ones besides K, each below K; with none of them everything is drafted. Steps are the only clock.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(sorted(widths))
        self._chosen = [0] * BUCKETS
        self._bucket = -1
        self._wide = self._narrow = self._looks = 0

    def begin(self, requests: int, elapsed: int = 1) -> int:
        """The width of a step of R requests; 0 is K. The call before was ``elapsed`` steps ago."""
        if not self.widths:
            return 0
        bucket = RunningRate.bucket(requests)
        if bucket != self._bucket:
            self._bucket, self._narrow, self._looks = bucket, 0, 0
        width = self._chosen[bucket]
        if width:
            self._narrow += elapsed
            if self._narrow > LOOK_STEPS:
                self._narrow, self._looks = 0, SETTLED_STEPS
            if self._looks:
                self._looks -= 1
                width = 0
        self._wide = 0 if width else self._wide + 1
        return width

    def compares(self) -> bool:
        """Whether this step, which drafts all K, should be compared with narrower ones."""
        if not self.widths or self._wide < SETTLED_STEPS:
            return False
        looked = bool(self._chosen[self._bucket]) and not self._looks
        return looked or self._wide % COMPARE_STEPS == SETTLED_STEPS

    def choose(self, gains: Sequence[float]) -> int:
        """Take the best width from now on, and return it.

        ``gains`` are the predicted tokens per ms with each of ``widths`` over those with K, minus 1.
        """
        best = max(range(len(gains)), key=gains.__getitem__)
        chosen = self._chosen[self._bucket]
        needed = LEAVE_GAIN if chosen else ENTER_GAIN
        self._chosen[self._bucket] = self.widths[best] if gains[best] > needed else 0
        return self._chosen[self._bucket]
