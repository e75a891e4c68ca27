"""What one rank's steps did, in numbers that /server_info shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_adaptive.runtime.relay import StepRecord


class Counters:
    """Sums over finished decode steps.

    ``verified`` and ``accepted`` count per draft position: how often the draft at that position was verified, and how
    often it was accepted.
    """

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self.steps = self.requests = self.verify_tokens = self.committed_tokens = self.drafted_tokens = 0
        self.verified = np.zeros(gamma, dtype=np.int64)
        self.accepted = np.zeros(gamma, dtype=np.int64)
        self.decisions = {"verify_all": 0, "trimmed": 0, "not_drafted": 0}

    def observe(self, record: StepRecord) -> None:
        """Add a finished step."""
        positions = np.arange(1, self.gamma + 1)
        self.steps += 1
        self.requests += len(record.slots)
        self.drafted_tokens += 0 if record.confidence is None else len(record.slots) * self.gamma
        self.verify_tokens += int(record.verify_lens.sum())
        self.committed_tokens += int(record.commit_lens.sum())
        self.verified += (record.verify_lens[:, None] > positions).sum(axis=0)
        self.accepted += (record.commit_lens[:, None] > positions).sum(axis=0)

    def decided(self, *, draft: bool, uniform: bool) -> None:
        """Count a decision."""
        self.decisions["not_drafted" if not draft else "verify_all" if uniform else "trimmed"] += 1

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for JSON."""
        per_request = max(self.requests, 1)
        return {
            "steps": self.steps,
            "requests": self.requests,
            "drafted_tokens": self.drafted_tokens,
            "verify_tokens": self.verify_tokens,
            "committed_tokens": self.committed_tokens,
            "accept_length": self.committed_tokens / per_request,
            "verify_length": self.verify_tokens / per_request,
            "budget_per_step": (self.verify_tokens - self.requests) / max(self.steps, 1),
            "verified_per_position": self.verified.tolist(),
            "accepted_per_position": self.accepted.tolist(),
            "decisions": dict(self.decisions),
        }
