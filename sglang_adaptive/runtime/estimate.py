"""Live confidences of drafts from the distributions that they were drafted with, and their confidence head if any."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_adaptive.policy.estimator import Estimator, features
from sglang_adaptive.policy.gather import Gather
from sglang_adaptive.policy.history import AcceptanceHistory
from sglang_adaptive.runtime.device import async_fill, async_h2d
from sglang_adaptive.runtime.relay import StepRecord
from sglang_adaptive.runtime.trace_features import DraftFeatures, width

# How often changed coefficients are sent to the device, in steps.
SEND_STEPS = 16


class Estimate:
    """Fits the policy's estimator on the CPU to finished steps; on the device it is applied to the running one.

    There lies what that takes, at places that stay, so that CUDA graphs may read them: ``coefficients`` [8, K], with a
    ``head`` [9, K], and without one ``by_slot`` [slots], the recent acceptance of each slot's request.

    Everything that it sees of a draft at position j depends on the tokens before j: the maximum and the entropy of the
    distribution at j, and how many drafts of the request were accepted in finished steps. The token that was drafted at
    j never enters, nor does a ``head`` see it. With ``learn`` False the draft's maximum is believed as it is, or the
    head where there is one.
    """

    def __init__(self, *, gamma: int, num_slots: int, device: Any, learn: bool = True, head: bool = False) -> None:
        self._device, self._gamma, self.learning, self.head = device, gamma, learn, head
        self._estimator = Estimator(gamma, head)
        self._history = AcceptanceHistory(num_slots)
        self._gather = Gather()
        self._recent: dict[int, np.ndarray] = {}
        self._version, self._steps = self._estimator.version, 0
        self._live: torch.Tensor | None = None
        self._table = torch.zeros(num_slots, dtype=torch.float32)
        self._known = self._table.numpy()
        self.coefficients = self._learned().to(device)
        self.by_slot = torch.zeros(num_slots, dtype=torch.float32, device=device)

    def begin(self, iteration: int, slots: np.ndarray, generations: np.ndarray) -> None:
        """Note what is known of the R requests of the step that comes next; on the CPU, before its launch."""
        recent = self._history.relative(slots, generations).astype(np.float32)
        self._recent[iteration] = recent
        if self.head:
            self._live = async_h2d(torch.from_numpy(recent), self._device)
            return
        self._known[slots] = recent
        async_fill(self.by_slot, self._table)

    @property
    def columns(self) -> int:
        """How many columns a step's ``extra`` has: ``trace_features.draft_columns``, then the head's confidences."""
        return width(self._gamma) + (self._gamma if self.head else 0)

    def live(self, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Recent acceptance [R] of the running step's requests, and the coefficients, both on the device.

        While steps are profiled, nothing is known of any request.
        """
        known = self._live is not None and len(self._live) == requests
        return self._live if known else torch.zeros(requests, device=self._device), self.coefficients

    def learn(self, record: StepRecord) -> None:
        """Learn from a finished step, whose ``extra`` are as ``columns`` says; in order."""
        recent = self._recent.pop(record.iteration)
        if record.confidence is None or record.extra is None:
            return
        verified, accepted = record.verify_lens - 1, record.commit_lens - 1
        self._history.observe(record.slots, record.generations, verified, accepted)
        if not self.learning:
            return
        together = self._gather.add(record.extra, recent, verified, accepted)
        if together is not None:
            steps, (extra, recent, verified, accepted) = together
            self._estimator.observe(self._features(extra, recent), verified, accepted, steps)
        self._steps += 1
        if self._steps % SEND_STEPS == 0 and self._estimator.version != self._version:
            self._version = self._estimator.version
            async_fill(self.coefficients, self._learned())

    def _features(self, extra: np.ndarray, recent: np.ndarray) -> np.ndarray:
        seen = DraftFeatures.of(extra, self._gamma)
        of_head = extra[:, width(self._gamma) :] if self.head else None
        return features(seen.max_probability, seen.entropy, recent, seen.temperature, of_head)

    def _learned(self) -> torch.Tensor:
        return torch.from_numpy(self._estimator.coefficients.astype(np.float32))
