"""Live confidences of drafts from the distributions that they were drafted with, and their confidence head if any."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_adaptive.policy.estimator import Estimator, estimate_on_device, features
from sglang_adaptive.policy.history import AcceptanceHistory
from sglang_adaptive.runtime.device import async_h2d
from sglang_adaptive.runtime.relay import StepRecord
from sglang_adaptive.runtime.trace_features import DraftFeatures, width

# How often changed coefficients are sent to the device, in steps.
SEND_STEPS = 16


class Estimate:
    """Fits the policy's estimator on the CPU to finished steps, and applies it on the device to the running one.

    Everything that it sees of a draft at position j depends on the tokens before j: the maximum and the entropy of the
    distribution at j, and how many drafts of the request were accepted in finished steps. The token that was drafted at
    j never enters, nor does a ``head`` see it. With ``learn`` False the draft's maximum is believed as it is, or the
    head where there is one.
    """

    def __init__(self, *, gamma: int, num_slots: int, device: Any, learn: bool = True, head: bool = False) -> None:
        self._device, self._gamma, self.learning, self.head = device, gamma, learn, head
        self._estimator = Estimator(gamma, head)
        self._history = AcceptanceHistory(num_slots)
        self._recent: dict[int, np.ndarray] = {}
        self._version, self._steps = -1, 0
        self._live: torch.Tensor | None = None
        self._send()

    def begin(self, iteration: int, slots: np.ndarray, generations: np.ndarray) -> None:
        """Note what is known of the R requests of the step that comes next; on the CPU, before its launch."""
        recent = self._history.relative(slots, generations)
        self._recent[iteration] = recent
        self._live = async_h2d(torch.from_numpy(recent.astype(np.float32)), self._device)

    @property
    def columns(self) -> int:
        """How many columns a step's ``extra`` has: ``trace_features.draft_columns``, then the head's confidences."""
        return width(self._gamma) + (self._gamma if self.head else 0)

    def live(self, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Recent acceptance [R] of the running step's requests, and the coefficients, both on the device.

        While steps are profiled, nothing is known of any request.
        """
        known = self._live is not None and len(self._live) == requests
        return self._live if known else torch.zeros(requests, device=self._device), self._coefficients

    def confidence(
        self, max_probability: torch.Tensor, entropy: torch.Tensor, temperature: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[R, K] float32 from the running step's distributions, both [R, K], and temperatures [R], 0 for greedy ones
        (None: all are); NaN where a maximum is no probability."""
        return estimate_on_device(max_probability, entropy, self._live, self._coefficients, temperature)

    def learn(self, record: StepRecord) -> None:
        """Learn from a finished step, whose ``extra`` are as ``columns`` says; in order."""
        recent = self._recent.pop(record.iteration)
        if record.confidence is None or record.extra is None:
            return
        verified, accepted = record.verify_lens - 1, record.commit_lens - 1
        self._history.observe(record.slots, record.generations, verified, accepted)
        if not self.learning:
            return
        seen, of_head = DraftFeatures.of(record.extra, self._gamma), None
        if self.head:
            of_head = record.extra[:, width(self._gamma) :]
        known = features(seen.max_probability, seen.entropy, recent, seen.temperature, of_head)
        self._estimator.observe(known, verified, accepted)
        self._steps += 1
        if self._steps % SEND_STEPS == 0 and self._estimator.version != self._version:
            self._send()

    def _send(self) -> None:
        self._version = self._estimator.version
        coefficients = torch.from_numpy(self._estimator.coefficients.astype(np.float32))
        self._coefficients = async_h2d(coefficients, self._device)
