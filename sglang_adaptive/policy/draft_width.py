"""How many tokens a step drafts: all K, or fewer where the drafter takes longer for them than they bring.

A block drafter's forward has K rows for each request. At many requests these rows cost as much as verifying, and the
deep ones are seldom verified there.

What a width brings is predicted from confidences. But a step that cuts a long run off leaves an easy text to the next
one, so that shorter drafts bring more than the confidences of steps with K say. So the predictions decide, times a
factor that trials learn: how much more one width brought than another one, over how much more it was predicted to.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_adaptive.policy.rate import BUCKETS, RunningRate
from sglang_adaptive.policy.steady import SAME_LOAD

MEASURE = "draft width: what such a step brings is measured"
# Confidences are up to two steps old: after so many wide steps on end all K of them are of wide drafts.
SETTLED_STEPS = 4
# While all K are drafted, one step in so many compares.
COMPARE_STEPS = 16
# So many steps with fewer, and then a look: SETTLED_STEPS with all K or a few more. After each look that leaves it at
# that twice as many, up to the most.
LOOK_STEPS, MOST_LOOK_STEPS = 64, 512
ENTER_GAIN, LEAVE_GAIN = 0.01, 0.0
# Predictions are a mean over the last so many requests' steps, and decide nothing before there were a few.
_PREDICTED_ROWS, _LEAST_PREDICTED = 64, 16

# The first trial of another width comes after so many steps, the next one after four times as many, up to the most.
FIRST_TRIAL, MOST_TRIAL = 64, 2048
# From the second one on a trial also waits until what it is believed to lose is no more than this share of the steps
# since the last one. The first one is not made where it is predicted to lose more than ``TRIAL_LOSS``.
PRICE, TRIAL_LOSS = 0.01, 0.3
# Observed requests' steps (rows) that tell a gain, from the least to the most. What all requests of a step bring has a
# part in common: no more than ``STEP_ROWS`` of them count.
LEAST_ROWS, MOST_ROWS, STEP_ROWS = 256, 1024, 32
# A trial that was not observed enough ends after so many steps, and the next one goes on with it.
_LONGEST_TRIAL = 4096
# Steps after another width that are left out: they go on from where that one left a text.
_TURN_STEPS = 4
# Rows that the mean of what was brought remembers. Where the last ``_RECENT_ROWS`` brought so much more or less it is
# another text.
_MEMORY_ROWS, _RECENT_ROWS, CHANGE = 4096, 512, 0.08


class DraftWidths:
    """The width that steps at each load draft with; loads are alike within a factor of ``SAME_LOAD``.

    ``widths`` are the ones besides K, each below K; with none of them everything is drafted. ``looks`` says of the step
    that was begun last that it drafts another width than the best one, to learn. Steps are the only clock, and what
    ``observe`` is told is the same on all ranks.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(sorted(widths))
        self._of_place = (0, *self.widths)
        self._places = {width: place for place, width in enumerate(self._of_place)}
        self._loads = [_Load(len(self._of_place)) for _ in range(BUCKETS)]
        self._load, self._requests = self._loads[0], 0
        self.looks = False
        self._wide = 0

    def begin(self, requests: int, elapsed: int = 1) -> int:
        """The width of a step of R requests; 0 is K. The call before was ``elapsed`` steps ago."""
        if not self.widths:
            return 0
        if not self._is_same(requests):
            self._load, self._requests = self._loads[RunningRate.bucket(requests)], requests
        load = self._load
        place = load.begin(requests, elapsed)
        self.looks = place != load.best
        self._wide = 0 if place else self._wide + 1
        return self._of_place[place]

    def compares(self) -> bool:
        """Whether this step, which drafts all K, should be compared with narrower ones."""
        if not self.widths or self._wide < SETTLED_STEPS:
            return False
        return self._wide % COMPARE_STEPS == SETTLED_STEPS or self._load.wants_prediction()

    @property
    def measures(self) -> bool:
        """Whether the step that was begun last should be observed: it says what a width brings."""
        return self._load.measures()

    def observe(self, requests: int, committed_tokens: int, width: int) -> None:
        """Count what a step that drafted ``width`` tokens (0: K) for each of R requests brought."""
        if self.widths and requests and committed_tokens:
            self._at(requests).observe(self._places[width], requests, committed_tokens / requests)

    def brought(self, width: int) -> float:
        """Tokens per request and step of ``width`` (0: K) at the load of this step; 0 where that is not known."""
        return self._load.known(self._places[width])

    def choose(self, requests: int, tokens: Sequence[float], speed: Sequence[float], gating: bool = False) -> int:
        """The width of this step of R requests, which would draft all K.

        ``tokens`` is the predicted output with each of ``widths`` over that with K, ``speed`` the ms with K over those
        with each; 0 where a width saves nothing and is never drafted. No trial while ``gating``.
        """
        return self._of_place[self._load.choose(max(requests, 1), tokens, speed, gating)]

    def _at(self, requests: int) -> _Load:
        return self._load if self._is_same(requests) else self._loads[RunningRate.bucket(requests)]

    def _is_same(self, requests: int) -> bool:
        return self._requests <= requests * SAME_LOAD and requests <= self._requests * SAME_LOAD


class _Load:
    """What is known at one load. A place is 0 for K, else 1 + that of the width."""

    def __init__(self, places: int) -> None:
        # The place to draft with; the other one that is on trial, and which of the two the trial wants to see, if any.
        self.best, self._rival, self._wanted = 0, -1, -1
        # Over K: predicted tokens, what these are to be multiplied by, and how much faster steps are.
        self._tokens, self._factor, self._speed = [1.0] * places, [1.0] * places, [1.0] + [0.0] * (places - 1)
        self._predicted = self._learned = 0
        # Of the places: tokens per request and step, the rows of that mean; and of the best one's last rows.
        self._brought, self._rows = [0.0] * places, [0] * places
        self._recent, self._recent_rows = 0.0, 0
        # Steps since the last trial ended, or since this one began; those that a trial waits for.
        self._since, self._wait, self._due, self._tried = 0, FIRST_TRIAL, float("inf"), False
        self._unlooked, self._interval, self._looks_left = 0, LOOK_STEPS, 0
        self._turn, self._turned = 0, 0

    # -- what a step drafts --

    def begin(self, requests: int, elapsed: int) -> int:
        self._since += elapsed
        if self._rival < 0 and self._since > self._due:
            self._begin_trial()
        if self._rival >= 0:
            if self._since <= _LONGEST_TRIAL:
                if self._wanted >= 0:
                    self._wanted = self._wants()
                return max(self._wanted, 0)
            self._end_trial()
        if self.best and not self._looks_left:
            self._unlooked += elapsed
            if self._unlooked > self._interval:
                self._unlooked, self._looks_left = 0, SETTLED_STEPS + (_LEAST_PREDICTED - 1) // max(requests, 1)
                # What this look says counts for half, or more.
                self._predicted = min(self._predicted, _LEAST_PREDICTED)
        if self._looks_left:
            self._looks_left -= 1
            return 0
        return self.best

    def wants_prediction(self) -> bool:
        if self._rival >= 0:
            return self._wanted < 0
        return self.best > 0 or self._predicted < _LEAST_PREDICTED

    def measures(self) -> bool:
        return self._rival >= 0 or (self._rows[self.best] < LEAST_ROWS and any(self._speed[1:]))

    def choose(self, requests: int, tokens: Sequence[float], speed: Sequence[float], gating: bool) -> int:
        rows = min(requests, _PREDICTED_ROWS)
        self._predicted = min(self._predicted + rows, _PREDICTED_ROWS)
        for place, (each, faster) in enumerate(zip(tokens, speed, strict=True), 1):
            self._tokens[place] += (each - self._tokens[place]) * rows / self._predicted
            self._speed[place] = faster
        if self._looks_left or self._predicted < _LEAST_PREDICTED:
            return 0
        if self._rival >= 0:
            if self._wanted >= 0 and not gating:
                return 0
            self._end_trial()
        if gating:
            # Not drafting is weighed against what is predicted, of which nothing is observed just now.
            worth = [self._tokens[place] * self._speed[place] for place in range(len(self._tokens))]
        else:
            worth = [self._worth(place) for place in range(len(self._tokens))]
        best = max(range(len(worth)), key=worth.__getitem__)
        if worth[best] > worth[self.best] * (1.0 + (LEAVE_GAIN if self.best else ENTER_GAIN)):
            self._take(best)
        elif self.best:
            self._interval = min(2 * self._interval, MOST_LOOK_STEPS)
        self._due = float("inf") if gating else self._due_after(worth, min(requests, STEP_ROWS))
        return self.best

    def _worth(self, place: int) -> float:
        """Tokens per ms over those with K, as believed."""
        return self._tokens[place] * self._factor[place] * self._speed[place]

    def _take(self, place: int) -> None:
        self.best, self._unlooked, self._interval = place, 0, LOOK_STEPS
        self._rows[place] = self._recent_rows = 0

    # -- trials --

    def _due_after(self, worth: Sequence[float], rows: int) -> float:
        """Steps since the last trial that the next one waits for, where each brings so many rows."""
        loss = 1.0 - max(each for place, each in enumerate(worth) if place != self.best) / worth[self.best]
        if loss == 1.0 or (loss > TRIAL_LOSS and not self._tried):
            return float("inf")
        return max(self._wait, _rows_to_tell(loss) / rows * loss / PRICE if self._tried else 0.0)

    def _begin_trial(self) -> None:
        others = (place for place in range(len(self._tokens)) if place != self.best)
        self._rival = self._wanted = max(others, key=self._worth)
        self._since = self._unlooked = self._looks_left = 0
        if self._rows[self._rival] >= LEAST_ROWS:
            self._rows[self._rival] = 0

    def _wants(self) -> int:
        """Of the two that are compared the one to be drafted next; -1 where enough was seen of both."""
        rival, best = self._rival, self.best
        rows: float = LEAST_ROWS
        if min(self._rows[rival], self._rows[best]) >= LEAST_ROWS:
            rates = [self._brought[place] * self._speed[place] for place in (rival, best)]
            if not all(rates):
                return -1
            rows = _rows_to_tell(rates[0] / rates[1] - 1.0)
        return rival if self._rows[rival] < rows else best if self._rows[best] < rows else -1

    def _end_trial(self) -> None:
        """Learn how much more the one brought than it was predicted to, over the other."""
        rival, best = self._rival, self.best
        rows = min(self._rows[rival], self._rows[best])
        if rows >= LEAST_ROWS:
            believed = self._tokens[rival] * self._factor[rival] / (self._tokens[best] * self._factor[best])
            ratio = self._brought[rival] / self._brought[best] / believed
            if self._tried and rows >= _rows_to_tell(ratio - 1.0):
                # No chance: what was learned was of another text.
                self._learned, self._wait = 0, FIRST_TRIAL
            more = 1.0 + (ratio - 1.0) * rows / (rows + self._learned)
            if rival:
                self._factor[rival] *= more
            else:
                self._factor[best] /= more
            self._learned, self._tried = min(self._learned + rows, MOST_ROWS), True
        self._rival, self._since = -1, 0
        self._wait, self._due = min(4 * self._wait, MOST_TRIAL), float("inf")

    # -- what steps brought --

    def observe(self, place: int, requests: int, tokens: float) -> None:
        if place != self._turn:
            self._turn, self._turned = place, 0
        if self._turned < _TURN_STEPS:
            self._turned += 1
            return
        rows = min(requests, STEP_ROWS)
        seen = self._rows[place] = min(self._rows[place] + rows, _MEMORY_ROWS)
        self._brought[place] += (tokens - self._brought[place]) * rows / seen
        if place == self.best and self._rival < 0:
            self._recent_rows = min(self._recent_rows + rows, _RECENT_ROWS)
            self._recent += (tokens - self._recent) * rows / self._recent_rows
            if self._recent_rows == _RECENT_ROWS and abs(self._recent / self._brought[place] - 1.0) > CHANGE:
                self._begin_text()

    def _begin_text(self) -> None:
        """Look at once, and try again soon: what was seen was another text."""
        self._rows = [0] * len(self._rows)
        self._recent_rows = self._predicted = self._learned = 0
        self._wait, self._due = FIRST_TRIAL, float("inf")
        self._unlooked = self._interval = LOOK_STEPS

    def known(self, place: int) -> float:
        return self._brought[place] if self._rows[place] >= LEAST_ROWS else 0.0


def _rows_to_tell(gain: float) -> float:
    """Requests' steps that tell ``gain`` from none: their mean's error is about 1 over their number's root."""
    return min(max(4.0 / max(gain * gain, 1e-9), LEAST_ROWS), MOST_ROWS)
