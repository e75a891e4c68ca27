"""Not drafting at all for a while, when even the best budget does not earn back what the drafter costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sglang_adaptive.policy.budget import Decision

SATURATED = "no draft: drafting costs more than it gains"
PROBE = "probe: draft to see whether it pays again"


# How many requests weigh as much as all earlier steps when the advantage of drafting is averaged.
_CALM_REQUESTS = 32
# An advantage of the other side counts for one more step for every so much of it.
_GROSS = 0.1


@dataclass(frozen=True)
class SkipRules:
    """Drafting stops once not drafting promises more than ``stop_margin``, and comes back once drafting promises more
    than ``return_margin``, both relative gains in tokens per ms and on ``patience`` steps on end (at least two; each
    counts once more for every tenth of gain): two thresholds, so that a load near the break-even does not flap. While
    skipping, ``probe_steps`` steps on end draft (as many as confidences need to come back through the relay) after
    ``first_interval`` skipped steps, after twice as many when that probe did not pay, and so on up to
    ``last_interval``, but not beyond the interval at which probing costs no more than ``probe_price`` of the output:
    where drafting loses little, looking is cheap."""

    stop_margin: float = 0.005
    return_margin: float = 0.01
    patience: int = 8
    probe_steps: int = 3
    first_interval: int = 64
    last_interval: int = 1024
    probe_price: float = 0.002


class SaturationGate:
    """Switches drafting off and on. Steps are its only clock."""

    def __init__(self, rules: SkipRules) -> None:
        self.rules = rules
        self.skipping = False
        self._level: float | None = None
        self._streak = 0
        self._since_probe = 0
        self._probing = 0
        self._interval = rules.first_interval
        self._load = 0

    def decide(self, drafting: Decision, plain_ms: float, requests: int, elapsed: int = 1) -> Decision:
        """Turn the best ``drafting`` decision into the step's; ``plain_ms`` is a step's cost without a drafter.

        The call before was ``elapsed`` steps ago.
        """
        if drafting.predicted_ms <= 0 or plain_ms <= 0 or not requests:
            return drafting
        level = self._averaged(
            math.log(drafting.expected_tokens / drafting.predicted_ms * plain_ms / requests), requests
        )
        advantage = math.exp(level)
        if self.skipping:
            for_change = advantage > 1 + self.rules.return_margin
        else:
            for_change = 1 / advantage > 1 + self.rules.stop_margin
        votes = 1 + int(abs(level) / _GROSS)
        # One step alone, however odd, changes nothing.
        most = self.rules.patience - (self._streak == 0)
        self._streak = min(self._streak + votes, max(most, 1)) if for_change else 0
        if self._streak >= self.rules.patience:
            self.skipping, self._streak, self._level = not self.skipping, 0, None
            self._since_probe, self._probing, self._interval = 0, 0, self.rules.first_interval
            self._load = requests
        if not self.skipping:
            return drafting
        self._since_probe += elapsed - 1
        if self._probing or self._probe_due(requests, 1 - advantage):
            self._probing -= 1
            if not self._probing:
                self._since_probe = 0
            return replace(drafting, reason=PROBE)
        self._since_probe += 1
        return Decision(0, False, False, float(requests), plain_ms, SATURATED, 1 / advantage - 1)

    def _averaged(self, level: float, requests: int) -> float:
        """One request's next tokens say little about whether drafting pays; a batch's say it in a few steps. While
        nothing is drafted, what is typical of the load speaks, which is an average already."""
        if self._level is None or self.skipping:
            self._level = level
        else:
            self._level += requests / (requests + _CALM_REQUESTS) * (level - self._level)
        return self._level

    def _probe_due(self, requests: int, loss: float) -> bool:
        # Another load is news: the long interval was earned at the old one.
        if not self._load / 2 <= requests <= self._load * 2:
            self._load, self._interval = requests, self.rules.first_interval
        affordable = self.rules.probe_steps * max(loss, 0.0) / self.rules.probe_price
        if self._since_probe < min(self._interval, max(affordable, self.rules.first_interval)):
            return False
        self._interval = min(2 * self._interval, self.rules.last_interval)
        self._probing = self.rules.probe_steps
        return True
