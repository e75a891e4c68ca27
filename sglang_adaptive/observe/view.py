"""The numbers of the live view: sums over ranks, their change between two moments, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_adaptive.observe.fetch import Snapshot
from sglang_adaptive.runtime.counters import DECISIONS, LOAD_COLUMNS, LOADS


@dataclass(frozen=True)
class Sums:
    """Additive counters of a server, over its data-parallel ranks. Times in ms; [L] by load, [K] by position.

    ``calibration`` holds drafts to judge by, and error, raw error and bias [K] weighted by them.
    """

    seconds: float
    load: dict[str, np.ndarray]
    drafted: float
    verified: np.ndarray
    accepted: np.ndarray
    decisions: dict[str, float]
    fallbacks: dict[str, float]
    timed_steps: float
    measured_ms: float
    predicted_ms: float
    error_ms: float

    @staticmethod
    def of(snapshot: Snapshot) -> Sums:
        """What has been counted up to then."""
        states = snapshot.states
        load = {name: np.zeros(LOADS) for name in LOAD_COLUMNS}
        for state in states:
            for at, row in state["by_load"].items():
                index = min(int(at).bit_length() - 1, LOADS - 1)
                for name in LOAD_COLUMNS:
                    load[name][index] += row[name]
        times = [state["step_time"] for state in states]
        return Sums(
            snapshot.at,
            load,
            sum(state["drafted_tokens"] for state in states),
            _positions(states, "verified_per_position"),
            _positions(states, "accepted_per_position"),
            _named(states, "decisions"),
            _named(states, "fallbacks"),
            *(sum(time[name] for time in times) for name in ("steps", "measured_ms", "predicted_ms", "error_ms")),
        )

    def since(self, before: Sums) -> Sums:
        """The change; all of it where the server has started again in between."""
        if self["steps"] < before["steps"]:
            return self
        return Sums(
            self.seconds - before.seconds,
            {name: value - before.load[name] for name, value in self.load.items()},
            self.drafted - before.drafted,
            self.verified - before.verified,
            self.accepted - before.accepted,
            {name: value - before.decisions.get(name, 0) for name, value in self.decisions.items()},
            {name: value - before.fallbacks.get(name, 0) for name, value in self.fallbacks.items()},
            self.timed_steps - before.timed_steps,
            self.measured_ms - before.measured_ms,
            self.predicted_ms - before.predicted_ms,
            self.error_ms - before.error_ms,
        )

    def __getitem__(self, name: str) -> float:
        """A column of the sums by load, over all loads."""
        return float(self.load[name].sum())


def ratio(above: float, below: float) -> float | None:
    """``above / below``; None of nothing."""
    return above / below if below else None


def share(sums: Sums, decision: str) -> float | None:
    """Of all steps, those with this decision."""
    return ratio(sums.decisions.get(decision, 0), sum(sums.decisions.get(name, 0) for name in DECISIONS))


def calibration(states: Sequence[dict[str, Any]], name: str) -> float | None:
    """``error`` or ``raw_error`` over ranks, weighted by how much they judge by."""
    known = [each["calibration"] for each in states if each["calibration"][name] is not None]
    return ratio(sum(each[name] * each["drafts"] for each in known), sum(each["drafts"] for each in known))


def bias(states: Sequence[dict[str, Any]], position: int) -> float | None:
    """Mean over ranks of confidence minus acceptance at a position, counted from 0."""
    known = [each["calibration"]["bias_per_position"][position] for each in states]
    values = [value for value in known if value is not None]
    return ratio(sum(values), len(values))


def _positions(states: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    return np.sum([state[name] for state in states], axis=0, dtype=np.float64)


def _named(states: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    total: dict[str, float] = {}
    for state in states:
        for key, value in state[name].items():
            total[key] = total.get(key, 0) + value
    return total
