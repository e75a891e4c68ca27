"""The decision of one step, in the order it happens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_adaptive.policy.budget import Decision, size_budget
from sglang_adaptive.policy.config import PolicyConfig
from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.policy.rate import BUCKETS, RunningRate
from sglang_adaptive.policy.survival import count_invalid, survival

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.integer]

__all__ = ["Engine", "PolicyConfig"]


class Engine:
    """Sizes the budget of every step and learns from what the steps did.

    There is no clock and no randomness inside: equal calls give equal decisions, so ranks that see the same
    confidences agree. Measured times differ between ranks; what is derived from them comes into force only through
    ``apply_measured``, with the vector of rank 0 on every rank. ``gamma`` is K, the draft tokens per request.
    """

    def __init__(self, config: PolicyConfig, cost: CostModel, gamma: int) -> None:
        self.config = config
        self.gamma = gamma
        self.profiled_cost = cost
        self.cost = cost
        self.invalid_requests = 0
        self.steps = 0
        self._previous: Decision | None = None
        self._rate = RunningRate()
        self._rates_in_force = np.zeros(BUCKETS)

    def size(
        self,
        confidence: Floats,
        *,
        requests: int,
        non_draft_tokens: int,
        kv_tokens: float,
        fresh: Bools,
        weights: Floats | None = None,
    ) -> Decision:
        """Decide one step from confidences that are at least one step old.

        ``confidence`` [requests, K]; ``fresh`` [requests] says which rows hold a confidence, the others (new requests)
        count as sure. ``non_draft_tokens`` and ``kv_tokens`` are totals of the step. ``weights`` [requests] > 0.
        """
        alive = survival(confidence)
        self.invalid_requests += count_invalid(confidence[fresh]) if requests else 0
        alive[~fresh] = 1.0
        decision = size_budget(
            alive,
            self.cost,
            non_draft_tokens,
            kv_tokens,
            rate_tokens_per_ms=self._rate_in_force(requests),
            weights=weights,
            min_gain=self.config.min_gain,
            min_len=self.config.min_len,
            max_len=self.config.max_len,
            trim_ms=self.config.trim_ms,
            previous=self._previous,
        )
        self._previous = decision
        return decision

    def observe(
        self,
        *,
        requests: int,
        non_draft_tokens: int,
        draft_tokens: int,
        kv_tokens: float,
        committed_tokens: int,
        step_ms: float | None = None,
        drafted: bool = True,
        confidence: Floats | None = None,
        verified: Ints | None = None,
        accepted: Ints | None = None,
    ) -> None:
        """Learn from a finished step.

        ``draft_tokens`` were verified over the batch, ``committed_tokens`` came out; ``step_ms`` is None where it was
        not measured. Per request: the raw ``confidence`` [requests, K] the step drafted with, how many drafts were
        ``verified`` and how many of those ``accepted`` [requests].
        """
        self.steps += 1
        if step_ms is not None:
            predicted = self.cost.step_ms(requests, non_draft_tokens, np.array([draft_tokens]), kv_tokens, drafted)
            self._rate.observe(requests, committed_tokens, step_ms, float(predicted[0]))
        if self.config.auto_refresh and self.refresh_due:
            self.apply_measured(self.measured_state())

    @property
    def refresh_due(self) -> bool:
        """True once per ``refresh_steps`` observed steps, on the same step of every rank."""
        return self.steps > 0 and self.steps % self.config.refresh_steps == 0

    def measured_state(self) -> Floats:
        """All that depends on this rank's clock, as one vector of fixed length, to be broadcast from rank 0."""
        return self._rate.rates()

    def apply_measured(self, state: Floats) -> None:
        """Bring a ``measured_state`` into force; every rank calls it with the same vector after the same step."""
        self._rates_in_force = state[:BUCKETS].copy()

    def _rate_in_force(self, requests: int) -> float | None:
        if self.config.objective == "ratio":
            return None
        rate = float(self._rates_in_force[RunningRate.bucket(requests)])
        return rate if rate > 0 else None
