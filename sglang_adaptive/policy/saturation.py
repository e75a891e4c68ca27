"""Not drafting at all for a while, when even the best budget does not earn back what the drafter costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_adaptive.policy.budget import Decision

SATURATED = "no draft: drafting costs more than it gains"
PROBE = "probe: draft to see whether it pays again"


@dataclass(frozen=True)
class SkipRules:
    """``margin``: relative gain in tokens per ms that either side must show, for ``patience`` steps on end, to change
    sides: two thresholds, so that a load near the break-even does not flap. While skipping, ``probe_steps`` steps on
    end draft (as many as confidences need to come back through the relay) after ``first_interval`` skipped steps, after
    twice as many when that probe did not pay, and so on up to ``last_interval``: probing costs at most
    probe_steps / first_interval of the loss."""

    margin: float = 0.02
    patience: int = 8
    probe_steps: int = 3
    first_interval: int = 64
    last_interval: int = 1024


class SaturationGate:
    """Switches drafting off and on. Steps are its only clock."""

    def __init__(self, rules: SkipRules) -> None:
        self.rules = rules
        self.skipping = False
        self._streak = 0
        self._since_probe = 0
        self._probing = 0
        self._interval = rules.first_interval
        self._load = 0

    def decide(self, drafting: Decision, plain_ms: float, requests: int) -> Decision:
        """Turn the best ``drafting`` decision into the step's; ``plain_ms`` is a step's cost without a drafter."""
        if drafting.predicted_ms <= 0 or plain_ms <= 0 or not requests:
            return drafting
        advantage = (drafting.expected_tokens / drafting.predicted_ms) / (requests / plain_ms)
        for_change = advantage > 1 + self.rules.margin if self.skipping else 1 / advantage > 1 + self.rules.margin
        self._streak = self._streak + 1 if for_change else 0
        if self._streak >= self.rules.patience:
            self.skipping, self._streak = not self.skipping, 0
            self._since_probe, self._probing, self._interval = 0, 0, self.rules.first_interval
            self._load = requests
        if not self.skipping:
            return drafting
        if self._probing or self._probe_due(requests):
            self._probing -= 1
            if not self._probing:
                self._since_probe = 0
            return replace(drafting, reason=PROBE)
        self._since_probe += 1
        return Decision(0, False, False, float(requests), plain_ms, SATURATED, 1 / advantage - 1)

    def _probe_due(self, requests: int) -> bool:
        # Another load is news: the long interval was earned at the old one.
        if not self._load / 2 <= requests <= self._load * 2:
            self._load, self._interval = requests, self.rules.first_interval
        if self._since_probe < self._interval:
            return False
        self._interval = min(2 * self._interval, self.rules.last_interval)
        self._probing = self.rules.probe_steps
        return True
