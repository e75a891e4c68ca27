"""What one rank's steps did, in numbers that /server_info and the metrics show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_adaptive.policy.budget import NO_TABLE, Decision
from sglang_adaptive.policy.calibration import Calibration
from sglang_adaptive.policy.survival import all_valid
from sglang_adaptive.runtime.calibration_error import CalibrationError

if TYPE_CHECKING:
    # The live view shares this module, and starts without torch.
    from sglang_adaptive.runtime.relay import StepRecord

FOLD_STEPS = 64
_JUDGED_ROWS = 1024
LOADS = 11
DECISIONS = ("verify_all", "trimmed", "not_drafted")
FALLBACKS = ("no_cost_table", "needs_draft", "invalid_confidence")
# Columns of the sums by load. The last four are of the steps whose time is known: tokens per second are
# timed_tokens / measured_ms over the server, and timed_tokens / request_ms for one request.
LOAD_COLUMNS = (
    "steps",
    "requests",
    "verify_tokens",
    "committed_tokens",
    "wasted_tokens",
    "timed_steps",
    "timed_tokens",
    "measured_ms",
    "request_ms",
)


class Counters:
    """Sums over finished decode steps.

    A step is only kept when it comes; 64 of them are summed at once, or fewer when somebody reads, so that a step pays
    next to nothing. A load is a number of requests in a step, by powers of two: 1, 2 to 3, 4 to 7, and so on.
    """

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self.ragged = True
        self._drafted_tokens = 0
        self._narrow_steps = 0
        self._verified = np.zeros(gamma, dtype=np.int64)
        self._accepted = np.zeros(gamma, dtype=np.int64)
        self._decisions = dict.fromkeys(DECISIONS, 0)
        self._fallbacks = dict.fromkeys(FALLBACKS, 0)
        self._timed_steps = 0
        self._predicted_ms = self._measured_ms = self._error_ms = 0.0
        self._by_load = np.zeros((LOADS, len(LOAD_COLUMNS)))
        # Of the steps whose time is known: how many, and their ms.
        self._by_decision = np.zeros((LOADS, len(DECISIONS), 2))
        self._calibration_error = CalibrationError(gamma)
        self._waiting: list[StepRecord] = []

    def begin_serving(self, calibration: Calibration | None, ragged: bool) -> None:
        """``calibration`` is the one that the policy applies, None where it trusts the head. ``ragged`` False: the
        attention backend verifies uniformly, so nothing is ever decided."""
        self.ragged = ragged
        self._calibration_error = CalibrationError(self.gamma, calibration)

    def observe(self, record: StepRecord) -> None:
        """Add a finished step."""
        self._waiting.append(record)
        if len(self._waiting) >= FOLD_STEPS:
            self._fold()

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts, for JSON."""
        self._fold()
        total = dict(zip(LOAD_COLUMNS, self._by_load.sum(axis=0).tolist(), strict=True))
        steps, requests = int(total["steps"]), int(total["requests"])
        return {
            "steps": steps,
            "requests": requests,
            "drafted_tokens": self._drafted_tokens,
            "narrow_draft_steps": self._narrow_steps,
            "verify_tokens": int(total["verify_tokens"]),
            "committed_tokens": int(total["committed_tokens"]),
            "accepted_tokens": int(self._accepted.sum()),
            "wasted_tokens": int(total["wasted_tokens"]),
            "accept_length": total["committed_tokens"] / max(requests, 1),
            "verify_length": total["verify_tokens"] / max(requests, 1),
            "budget_per_step": (total["verify_tokens"] - requests) / max(steps, 1),
            "verified_per_position": self._verified.tolist(),
            "accepted_per_position": self._accepted.tolist(),
            "decisions": dict(self._decisions),
            "fallbacks": dict(self._fallbacks),
            "ragged_verify": self.ragged,
            "step_time": {
                "steps": self._timed_steps,
                "measured_ms": self._measured_ms,
                "predicted_ms": self._predicted_ms,
                "error_ms": self._error_ms,
            },
            "calibration": self._calibration_error.as_dict(),
            "by_load": {
                str(1 << load): dict(zip(LOAD_COLUMNS, row.tolist(), strict=True))
                | {"by_decision": self._times_of(load)}
                for load, row in enumerate(self._by_load)
                if row[0]
            },
        }

    def _times_of(self, load: int) -> dict[str, dict[str, float]]:
        rows = zip(DECISIONS, self._by_decision[load].tolist(), strict=True)
        return {name: {"timed_steps": int(steps), "measured_ms": ms} for name, (steps, ms) in rows if steps}

    def _fold(self) -> None:
        records, self._waiting = [record for record in self._waiting if len(record.slots)], []
        if not records:
            return
        requests = np.array([len(record.slots) for record in records])
        verify = np.concatenate([record.verify_lens for record in records])
        commit = np.concatenate([record.commit_lens for record in records])
        drafts, accepted = verify - 1, np.minimum(commit, verify) - 1
        self._verified += _reached(drafts, self.gamma)
        self._accepted += _reached(accepted, self.gamma)
        widths = np.array([(record.width or self.gamma) * record.drafted for record in records])
        self._drafted_tokens += int((requests * widths).sum())
        self._narrow_steps += sum(record.drafted and record.width > 0 for record in records)
        measured = np.array([np.nan if record.step_ms is None else record.step_ms for record in records], np.float64)
        self._fold_times(measured, records)
        for record in records:
            self._count(record.decision)

        starts = np.cumsum(requests) - requests
        committed = np.add.reduceat(commit, starts)
        timed = np.isfinite(measured)
        columns = [
            np.ones(len(records)),
            requests,
            np.add.reduceat(verify, starts),
            committed,
            np.add.reduceat(drafts - accepted, starts),
            timed,
            np.where(timed, committed, 0),
            np.where(timed, measured, 0.0),
            np.where(timed, measured * requests, 0.0),
        ]
        loads = load_of(requests)
        np.add.at(self._by_load, loads, np.stack(columns, axis=1))
        decided = np.array([record.decision is not None for record in records]) & timed
        kinds = [
            DECISIONS.index(_name(record.decision)) for record, known in zip(records, decided, strict=True) if known
        ]
        times = np.stack([np.ones(len(kinds)), measured[decided]], axis=1)
        np.add.at(self._by_decision, (loads[decided], np.array(kinds, np.int64)), times)

        drafted = [record for record in records if record.confidence is not None]
        heard = (record.confidence[:, : record.width or self.gamma] for record in drafted)
        self._fallbacks["invalid_confidence"] += sum(not all_valid(confidence) for confidence in heard)
        if drafted:
            # A sample of the steps says it as well, and bounds what a fold costs.
            seen = drafted[:: 1 + sum(len(record.slots) for record in drafted) // _JUDGED_ROWS]
            confidence = np.concatenate([record.confidence for record in seen])
            lens = np.concatenate([np.stack([record.verify_lens, record.commit_lens]) for record in seen], axis=1)
            self._calibration_error.observe(confidence, lens[0] - 1, np.minimum(lens[0], lens[1]) - 1)

    def _fold_times(self, measured: np.ndarray, records: list[StepRecord]) -> None:
        predicted = np.array([getattr(record.decision, "predicted_ms", 0.0) for record in records])
        both = np.isfinite(measured) & (predicted > 0)
        measured, predicted = measured[both], predicted[both]
        self._timed_steps += int(both.sum())
        self._measured_ms += float(measured.sum())
        self._predicted_ms += float(predicted.sum())
        self._error_ms += float(np.abs(measured - predicted).sum())

    def _count(self, decision: Decision | None) -> None:
        if decision is None:
            return
        self._decisions[_name(decision)] += 1
        self._fallbacks["no_cost_table"] += decision.reason == NO_TABLE
        # The policy did without a draft, and the batch needed the host's full step.
        self._fallbacks["needs_draft"] += decision.draft and decision.reason.startswith("no draft:")


def _name(decision: Decision) -> str:
    return "not_drafted" if not decision.draft else "verify_all" if decision.uniform else "trimmed"


def load_of(requests: np.ndarray) -> np.ndarray:
    """Index of the load that steps of ``requests`` (at least 1) belong to; the last one has no upper end."""
    return np.minimum(np.log2(requests).astype(np.int64), LOADS - 1)


def _reached(lengths: np.ndarray, gamma: int) -> np.ndarray:
    """[K] how many of ``lengths`` are at least 1, 2, ..., K."""
    counts = np.bincount(np.clip(lengths, 0, gamma), minlength=gamma + 1)
    return counts[::-1].cumsum()[::-1][1:]
