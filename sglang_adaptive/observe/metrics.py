"""Our counters on the host's own Prometheus endpoint, written when the host writes its metrics.

Everything additive is a counter, so that ratios can be taken over any window and any set of servers; what a dashboard
cannot derive from counters is a gauge. Labels are the host's (model, rank, ...), and those named here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_adaptive.runtime.counters import Counters

logger = logging.getLogger(__name__)

PREFIX = "sglang:adaptive_"
LabelValues = tuple[str, ...]
Sample = tuple[str, LabelValues, float]


@dataclass(frozen=True)
class Metric:
    """One metric: name without ``PREFIX``, what it means, and its labels beside the host's."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


METRICS = (
    Metric("steps_total", "Finished decode steps, by what was decided for them.", ("decision",)),
    Metric("fallbacks_total", "Steps in which the policy could not have its way, by reason.", ("reason",)),
    Metric("drafted_tokens_total", "Tokens that the draft model proposed."),
    Metric("verified_drafts_total", "Draft tokens verified, by their position in the block.", ("position",)),
    Metric("accepted_drafts_total", "Draft tokens accepted, by their position in the block.", ("position",)),
    Metric("wasted_tokens_total", "Draft tokens verified and rejected."),
    Metric(
        "load_steps_total",
        "Finished decode steps, by load: requests in the step, lower end of 1, 2-3, 4-7, ...",
        ("load",),
    ),
    Metric("load_requests_total", "Requests summed over finished decode steps, by load.", ("load",)),
    Metric("verify_tokens_total", "Tokens verified, one anchor per request and step among them, by load.", ("load",)),
    Metric("committed_tokens_total", "Tokens that came out of decode steps, by load.", ("load",)),
    Metric("timed_steps_total", "Finished decode steps whose time is known, by load.", ("load",)),
    Metric("timed_tokens_total", "Tokens that came out of the steps whose time is known, by load.", ("load",)),
    Metric("timed_step_seconds_total", "Time of the steps whose time is known, by load.", ("load",)),
    Metric("timed_request_seconds_total", "The same, times the requests in each step, by load.", ("load",)),
    Metric("measured_steps_total", "Steps whose time was predicted and measured."),
    Metric("predicted_step_seconds_total", "Predicted time of the steps whose time was predicted and measured."),
    Metric("measured_step_seconds_total", "Measured time of the steps whose time was predicted and measured."),
    Metric("step_error_seconds_total", "Absolute difference of predicted and measured step time, summed over steps."),
    Metric("budget_tokens", "Draft tokens verified per step, mean since the last time this was written."),
    Metric("verify_length", "Tokens verified per request and step, mean since the last time this was written."),
    Metric(
        "calibration_error", "Expected calibration error (0-1) of the confidences that the policy uses, recent steps."
    ),
    Metric("raw_calibration_error", "Expected calibration error (0-1) of the draft's own confidences, recent steps."),
    Metric("calibration_bias", "Confidence used minus acceptance, by position, recent steps.", ("position",)),
    Metric("ragged_verify", "1 where each request can verify a number of its own, 0 where attention is uniform only."),
)
_BY_LOAD = {
    "load_steps_total": ("steps", 1.0),
    "load_requests_total": ("requests", 1.0),
    "verify_tokens_total": ("verify_tokens", 1.0),
    "committed_tokens_total": ("committed_tokens", 1.0),
    "timed_steps_total": ("timed_steps", 1.0),
    "timed_tokens_total": ("timed_tokens", 1.0),
    "timed_step_seconds_total": ("measured_ms", 1e-3),
    "timed_request_seconds_total": ("request_ms", 1e-3),
}


def samples(state: dict[str, Any]) -> Iterator[Sample]:
    """Name, label values and value of every series of a ``Counters.as_dict``, but for the two means."""
    for name in ("decisions", "fallbacks"):
        metric = "steps_total" if name == "decisions" else "fallbacks_total"
        yield from ((metric, (label,), value) for label, value in state[name].items())
    yield "drafted_tokens_total", (), state["drafted_tokens"]
    yield "wasted_tokens_total", (), state["wasted_tokens"]
    for name in ("verified", "accepted"):
        for position, value in enumerate(state[f"{name}_per_position"], 1):
            yield f"{name}_drafts_total", (str(position),), value
    for load, sums in state["by_load"].items():
        yield from ((name, (load,), sums[column] * unit) for name, (column, unit) in _BY_LOAD.items())
    for name in ("predicted", "measured"):
        yield f"{name}_step_seconds_total", (), state["step_time"][f"{name}_ms"] * 1e-3
    yield "measured_steps_total", (), state["step_time"]["steps"]
    yield "step_error_seconds_total", (), state["step_time"]["error_ms"] * 1e-3
    calibration = state["calibration"]
    if calibration["error"] is not None:
        yield "calibration_error", (), calibration["error"]
        yield "raw_calibration_error", (), calibration["raw_error"]
    for position, bias in enumerate(calibration["bias_per_position"], 1):
        if bias is not None:
            yield "calibration_bias", (str(position),), bias
    yield "ragged_verify", (), float(state["ragged_verify"])


class Exporter:
    """Writes one rank's counters through the classes and with the labels of the host's ``collector``.

    Nothing that goes wrong here reaches the server: it is logged once, and writing ends.
    """

    def __init__(self, collector: Any, counters: Counters) -> None:
        # Only now: the package chooses where it keeps its values when it is imported.
        from prometheus_client import Counter, Gauge

        self._counters = counters
        self._host_labels = dict(collector.labels)
        counter, gauge = collector._counter_cls or Counter, collector._gauge_cls or Gauge
        self._metrics = {}
        for metric in METRICS:
            mode = {} if metric.is_counter else {"multiprocess_mode": "mostrecent"}
            self._metrics[metric.name] = (counter if metric.is_counter else gauge)(
                name=PREFIX + metric.name,
                documentation=metric.help,
                labelnames=[*self._host_labels, *metric.labels],
                **mode,
            )
        self._labels = {metric.name: metric.labels for metric in METRICS}
        self._series: dict[tuple[str, LabelValues], Any] = {}
        self._written: dict[tuple[str, LabelValues], float] = {}
        self._before = counters.as_dict()
        self._on = True

    def write(self) -> None:
        """Bring the endpoint up to date; series that did not change cost nothing."""
        if not self._on:
            return
        try:
            state = self._counters.as_dict()
            for name, values, value in [*samples(state), *self._means(state)]:
                self._write(name, values, value)
        except Exception as error:  # whatever it is, serving goes on
            self._on = False
            logger.warning("sglang_adaptive: cannot write its metrics (%s); they stay as they are.", error)

    def _means(self, state: dict[str, Any]) -> list[Sample]:
        steps, requests, tokens = (state[n] - self._before[n] for n in ("steps", "requests", "verify_tokens"))
        if not steps:
            return []
        self._before = state
        return [("budget_tokens", (), (tokens - requests) / steps), ("verify_length", (), tokens / requests)]

    def _write(self, name: str, values: LabelValues, value: float) -> None:
        key = (name, values)
        before = self._written.get(key)
        if value == before:
            return
        series = self._series.get(key)
        if series is None:
            own = dict(zip(self._labels[name], values, strict=True))
            series = self._series[key] = self._metrics[name].labels(**self._host_labels, **own)
        if name.endswith("_total"):
            series.inc(value - (before or 0.0))
        else:
            series.set(value)
        self._written[key] = value
