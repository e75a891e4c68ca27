"""What a trace says, as the arrays that its charts show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.observe.reliability import Reliability, reliability
from sglang_adaptive.runtime.counters import load_of
from sglang_adaptive.runtime.trace_format import COUNTED, DECIDED, DRAFTED
from sglang_adaptive.runtime.trace_reader import Trace

TIME_BINS = 160
MOST_POINTS = 200
_LEAST_TIMED = 3
_POINTS_PER_OCTAVE = 20


@dataclass(frozen=True)
class Steps:
    """Of S steps: requests, drafts verified and accepted, each [S] float; [S] bool whether it drafted and whether a
    decision was known; measured and predicted ms, NaN where unknown; [S] index of the reason."""

    requests: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    drafted: np.ndarray
    decided: np.ndarray
    measured_ms: np.ndarray
    predicted_ms: np.ndarray
    reason: np.ndarray

    @staticmethod
    def of(trace: Trace) -> Steps:
        kept = trace.steps["requests"] > 0
        steps = trace.steps[kept]
        requests = steps["requests"].astype(np.int64)
        starts = np.cumsum(requests) - requests
        sums = [np.add.reduceat(trace.rows[name].astype(np.float64), starts) for name in ("verified", "accepted")]
        measured, predicted = (_positive(steps[name]) for name in ("step_ms", "predicted_ms"))
        flags = steps["flags"]
        drafted, decided = (flags & (DRAFTED | COUNTED)) > 0, (flags & DECIDED) > 0
        return Steps(requests.astype(float), *sums, drafted, decided, measured, predicted, steps["reason"].astype(int))

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(frozen=True)
class OverTime:
    """[T] by equal numbers of steps: number of the middle step, requests in a step, tokens verified and accepted per
    request and step."""

    step: np.ndarray
    requests: np.ndarray
    verify_length: np.ndarray
    accept_length: np.ndarray


@dataclass(frozen=True)
class Load:
    """Steps of one load, ``low`` to ``high`` requests. Rates are NaN where no time is known; in tokens/s."""

    low: int
    high: int
    steps: int
    verify_length: float
    accept_length: float
    server_rate: float
    user_rate: float
    reasons: np.ndarray

    @property
    def name(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Cost:
    """Steps of one kind by tokens verified: how many, measured median, 10th and 90th percentile, predicted median."""

    tokens: np.ndarray
    count: np.ndarray
    measured: np.ndarray
    low: np.ndarray
    high: np.ndarray
    predicted: np.ndarray


@dataclass(frozen=True)
class Summary:
    """Everything that the page shows.

    Attributes:
        lengths: [K + 1] share of requests and steps that gave 1, 2, ..., K + 1 tokens.
        proposed, verified, accepted: [K] drafts by position.
        step_error: median of |predicted - measured| / measured; None where nothing was timed.
    """

    gamma: int
    meta: dict[str, str]
    reasons: list[str]
    lost: int
    truncated: bool
    steps: int
    requests: float
    tokens: float
    drafted_steps: int
    seconds: float
    step_error: float | None
    over_time: OverTime
    loads: list[Load]
    lengths: np.ndarray
    proposed: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    drafting_cost: Cost
    plain_cost: Cost
    reliability: Reliability


def summarise(trace: Trace) -> Summary:
    """Raises AdaptiveError for a trace without steps."""
    if not len(trace.rows):
        raise AdaptiveError("The trace has no steps yet; send the server requests while it records.")
    steps = Steps.of(trace)
    both = np.isfinite(steps.measured_ms) & np.isfinite(steps.predicted_ms)
    error = np.abs(steps.predicted_ms[both] / steps.measured_ms[both] - 1.0)
    rows, reasons = trace.rows, len(trace.reasons)
    drafted = int(steps.requests[steps.drafted].sum())
    return Summary(
        trace.gamma,
        trace.meta,
        trace.reasons,
        trace.lost,
        trace.truncated,
        steps=len(steps),
        requests=float(steps.requests.sum()),
        tokens=float((steps.requests + steps.accepted).sum()),
        drafted_steps=int(steps.drafted.sum()),
        seconds=float(np.nansum(steps.measured_ms)) / 1e3,
        step_error=float(np.median(error)) if error.size else None,
        over_time=_over_time(steps),
        loads=_loads(steps, reasons),
        lengths=np.bincount(rows["accepted"], minlength=trace.gamma + 1) / len(rows),
        proposed=np.full(trace.gamma, drafted),
        verified=_reached(rows["verified"], trace.gamma),
        accepted=_reached(rows["accepted"], trace.gamma),
        drafting_cost=_cost(steps, steps.drafted),
        plain_cost=_cost(steps, ~steps.drafted),
        reliability=reliability(trace),
    )


def _positive(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    return np.where(np.isfinite(wide) & (wide > 0), wide, np.nan)


def _reached(lengths: np.ndarray, gamma: int) -> np.ndarray:
    return np.bincount(lengths, minlength=gamma + 1)[::-1].cumsum()[::-1][1:].astype(np.float64)


def _over_time(steps: Steps) -> OverTime:
    bins = min(TIME_BINS, len(steps))
    which = np.arange(len(steps)) * bins // len(steps)
    count, requests, verified, accepted = (
        np.bincount(which, weights) for weights in (None, steps.requests, steps.verified, steps.accepted)
    )
    middle = np.cumsum(count) - count / 2
    return OverTime(middle, requests / count, 1 + verified / requests, 1 + accepted / requests)


def _loads(steps: Steps, reasons: int) -> list[Load]:
    bucket = load_of(steps.requests)
    loads = []
    for index in np.unique(bucket):
        mine = bucket == index
        timed = mine & np.isfinite(steps.measured_ms)
        tokens, ms = (steps.requests + steps.accepted)[timed].sum(), steps.measured_ms[timed]
        request_ms = (ms * steps.requests[timed]).sum()
        known = mine & steps.decided
        requests = steps.requests[mine].sum()
        loads.append(
            Load(
                int(steps.requests[mine].min()),
                int(steps.requests[mine].max()),
                int(mine.sum()),
                float(1 + steps.verified[mine].sum() / requests),
                float(1 + steps.accepted[mine].sum() / requests),
                float(1e3 * tokens / ms.sum()) if ms.size else np.nan,
                float(1e3 * tokens / request_ms) if ms.size else np.nan,
                np.bincount(steps.reason[known], minlength=reasons) / mine.sum(),
            )
        )
    return loads


def _cost(steps: Steps, mine: np.ndarray) -> Cost:
    mine = mine & np.isfinite(steps.measured_ms)
    tokens = (steps.requests + steps.verified)[mine]
    measured, predicted = steps.measured_ms[mine], steps.predicted_ms[mine]
    key = tokens
    if np.unique(tokens).size > MOST_POINTS:
        key = np.round(np.log2(tokens) * _POINTS_PER_OCTAVE)
    order = np.argsort(key, kind="stable")
    cuts = np.flatnonzero(np.diff(key[order])) + 1
    table = []
    for here in np.split(order, cuts):
        if here.size >= _LEAST_TIMED:
            low, middle, high = np.percentile(measured[here], [10, 50, 90])
            known = predicted[here][np.isfinite(predicted[here])]
            expected = np.median(known) if known.size else np.nan
            table.append([np.median(tokens[here]), here.size, middle, low, high, expected])
    return Cost(*np.array(table, np.float64).reshape(-1, 6).T)
