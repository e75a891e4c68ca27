"""Our numbers on the host's Prometheus endpoint, where ``--enable-metrics`` opens it."""

from __future__ import annotations

from typing import Any

from sglang_adaptive.patches.registry import Patch

_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
_COLLECTORS = "sglang.srt.observability.metrics_collector"
_COLLECTOR = f"{_COLLECTORS}.SchedulerMetricsCollector"


def _attach(result: None, reporter: Any) -> None:
    """The ranks that write metrics are the host's choice."""
    counters = getattr(reporter.scheduler.draft_worker, "adaptive_counters", None)
    if counters is not None and reporter.current_scheduler_metrics_enabled:
        from sglang_adaptive.observe.metrics import Exporter

        reporter.metrics_collector.sglang_adaptive = Exporter(reporter.metrics_collector, counters)


def _write(result: None, collector: Any, stats: Any) -> None:
    exporter = getattr(collector, "sglang_adaptive", None)
    if exporter is not None:
        exporter.write()


PATCHES = [
    Patch(
        target=f"{_REPORTER}.__post_init__",
        hook=_attach,
        kind="after",
        why="The reporter knows the draft worker, the collector with its labels, and whether this rank writes metrics; "
        "the host has no place where a plugin could add its own.",
        depends=(f"{_COLLECTOR}.init_new", f"{_COLLECTORS}._StatLoggerDIMixin"),
        remove_when="draft workers can contribute to the scheduler's metrics",
    ),
    Patch(
        target=f"{_COLLECTOR}.log_stats",
        hook=_write,
        kind="after",
        why="The host writes its gauges here, once in every --decode-log-interval steps and when it becomes idle.",
        depends=(f"{_REPORTER}.report_decode_stats", f"{_REPORTER}._maybe_log_idle_metrics"),
        remove_when="draft workers can contribute to the scheduler's metrics",
    ),
]
