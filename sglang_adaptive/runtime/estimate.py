"""Live confidences of drafts without a confidence head, from the distributions that they were drafted with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_adaptive.policy.estimator import Estimator, estimate_on_device, features
from sglang_adaptive.policy.history import AcceptanceHistory
from sglang_adaptive.runtime.device import async_h2d
from sglang_adaptive.runtime.relay import StepRecord
from sglang_adaptive.runtime.trace_features import DraftFeatures

# How often changed coefficients are sent to the device, in steps.
SEND_STEPS = 16


class Estimate:
    """Fits the policy's estimator on the CPU to finished steps, and applies it on the device to the running one.

    Everything that it sees of a draft at position j depends on the tokens before j: the maximum and the entropy of the
    distribution at j, and how many drafts of the request were accepted in finished steps. The token that was drafted at
    j never enters. With ``learn`` False the draft's maximum is believed as it is.
    """

    def __init__(self, *, gamma: int, num_slots: int, device: Any, learn: bool = True) -> None:
        self._device, self._learning = device, learn
        self._estimator = Estimator(gamma)
        self._history = AcceptanceHistory(num_slots)
        self._recent: dict[int, np.ndarray] = {}
        self._version, self._steps = -1, 0
        self._send()

    def begin(self, iteration: int, slots: np.ndarray, generations: np.ndarray) -> None:
        """Note what is known of the R requests of the step that comes next; on the CPU, before its launch."""
        recent = self._history.relative(slots, generations)
        self._recent[iteration] = recent
        self._live = async_h2d(torch.from_numpy(recent.astype(np.float32)), self._device)

    def confidence(
        self, max_probability: torch.Tensor, entropy: torch.Tensor, temperature: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[R, K] float32 from the running step's distributions, both [R, K], and temperatures [R], 0 for greedy ones
        (None: all are); NaN where a maximum is no probability."""
        return estimate_on_device(max_probability, entropy, self._live, self._coefficients, temperature)

    def learn(self, record: StepRecord) -> None:
        """Learn from a finished step, whose ``extra`` are ``trace_features.draft_columns``; in order."""
        recent = self._recent.pop(record.iteration)
        if record.confidence is None or record.extra is None:
            return
        verified, accepted = record.verify_lens - 1, record.commit_lens - 1
        self._history.observe(record.slots, record.generations, verified, accepted)
        if not self._learning:
            return
        seen = DraftFeatures.of(record.extra)
        known = features(seen.max_probability, seen.entropy, recent, seen.temperature)
        self._estimator.observe(known, verified, accepted)
        self._steps += 1
        if self._steps % SEND_STEPS == 0 and self._estimator.version != self._version:
            self._send()

    def _send(self) -> None:
        self._version = self._estimator.version
        coefficients = torch.from_numpy(self._estimator.coefficients.astype(np.float32))
        self._coefficients = async_h2d(coefficients, self._device)
