"""Our metrics on the host's endpoint: what they say, when they are written, and what the dashboard asks for."""

from __future__ import annotations

import json
import logging
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import prometheus_client
import pytest
from test_observe_counters import GAMMA, observed, some_records

from sglang_adaptive.observe.metrics import METRICS, PREFIX, Exporter, samples
from sglang_adaptive.patches import metrics as patches
from sglang_adaptive.runtime.counters import Counters

DASHBOARD = Path(__file__).parents[2] / "launch" / "grafana" / "sglang-adaptive.json"
HOST_LABELS = {"model_name": "m", "engine_type": "unified", "tp_rank": 0}
# Of the host itself, and of Prometheus.
FOREIGN = {"sglang:num_running_reqs": {"model_name", "instance"}}


def collector() -> tuple[Any, prometheus_client.CollectorRegistry]:
    registry = prometheus_client.CollectorRegistry()
    counter, gauge = (partial(kind, registry=registry) for kind in (prometheus_client.Counter, prometheus_client.Gauge))
    return SimpleNamespace(labels=HOST_LABELS, _counter_cls=counter, _gauge_cls=gauge), registry


def written(registry: prometheus_client.CollectorRegistry, name: str, **labels: str) -> float | None:
    host = {key: str(value) for key, value in HOST_LABELS.items()}
    return registry.get_sample_value(PREFIX + name, {**host, **labels})


def test_every_series_is_declared_with_its_labels():
    state = observed(some_records(100)).as_dict()
    declared = {metric.name: metric.labels for metric in METRICS}
    assert len(declared) == len(METRICS)
    seen = list(samples(state))
    for name, labels, value in seen:
        assert len(labels) == len(declared[name]) and np.isfinite(value)
    assert {name for name, _, _ in seen} | {"budget_tokens", "verify_length"} == set(declared)


def test_what_is_written_is_what_server_info_says():
    records = some_records(300)
    counters = Counters(GAMMA)
    host, registry = collector()
    exporter = Exporter(host, counters)
    for number, each in enumerate(records):
        counters.observe(each)
        if number % 41 == 0:
            exporter.write()
    exporter.write()
    state = counters.as_dict()
    for decision, count in state["decisions"].items():
        assert written(registry, "steps_total", decision=decision) == count
    assert written(registry, "drafted_tokens_total") == state["drafted_tokens"]
    assert written(registry, "wasted_tokens_total") == state["wasted_tokens"]
    for position, count in enumerate(state["accepted_per_position"], 1):
        assert written(registry, "accepted_drafts_total", position=str(position)) == count
    for load, sums in state["by_load"].items():
        assert written(registry, "verify_tokens_total", load=load) == sums["verify_tokens"]
        assert written(registry, "timed_step_seconds_total", load=load) == pytest.approx(sums["measured_ms"] / 1e3)
    assert written(registry, "step_error_seconds_total") == pytest.approx(state["step_time"]["error_ms"] / 1e3)
    assert written(registry, "calibration_error") == pytest.approx(state["calibration"]["error"])
    assert written(registry, "ragged_verify") == 1


def test_means_are_of_the_steps_since_the_last_writing():
    counters = Counters(GAMMA)
    host, registry = collector()
    exporter = Exporter(host, counters)
    first, second = some_records(80, seed=1), some_records(30, seed=2)
    for batch in (first, second):
        for each in batch:
            counters.observe(each)
        exporter.write()
        budget = sum(int(each.verify_lens.sum()) - len(each.slots) for each in batch) / len(batch)
        assert written(registry, "budget_tokens") == pytest.approx(budget)
    exporter.write()
    assert written(registry, "budget_tokens") == pytest.approx(budget), "an idle server keeps the last mean"


def test_series_that_did_not_change_are_not_touched():
    counters = observed(some_records(50))
    host, _ = collector()
    touched = []
    exporter = Exporter(host, counters)
    exporter.write()
    for series in exporter._series.values():
        series.inc = series.set = lambda value: touched.append(value)
    exporter.write()
    assert touched == []


def test_trouble_is_logged_once_and_goes_no_further(caplog):
    counters = observed(some_records(10))
    host, _ = collector()
    exporter = Exporter(host, counters)
    counters.as_dict = lambda: 1 / 0
    with caplog.at_level(logging.WARNING):
        exporter.write()
        exporter.write()
    assert [record.message for record in caplog.records] == [
        "sglang_adaptive: cannot write its metrics (division by zero); they stay as they are."
    ]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_host_decides_which_ranks_write(enabled):
    host, registry = collector()
    counters = observed(some_records(10))
    reporter = SimpleNamespace(
        scheduler=SimpleNamespace(draft_worker=SimpleNamespace(adaptive_counters=counters)),
        current_scheduler_metrics_enabled=enabled,
        metrics_collector=host,
    )
    patches._attach(None, reporter)
    patches._write(None, host, object())
    assert (written(registry, "drafted_tokens_total") is not None) == enabled


@pytest.mark.parametrize("worker", [None, SimpleNamespace()])
def test_other_algorithms_get_no_metrics(worker):
    host, registry = collector()
    reporter = SimpleNamespace(
        scheduler=SimpleNamespace(draft_worker=worker), current_scheduler_metrics_enabled=True, metrics_collector=host
    )
    patches._attach(None, reporter)
    patches._write(None, host, object())
    assert list(registry.collect()) == []


def queries() -> list[tuple[str, str]]:
    board = json.loads(DASHBOARD.read_text())
    found = [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel["targets"]]
    return found + [
        (each["name"], each["query"]["query"]) for each in board["templating"]["list"] if "definition" in each
    ]


@pytest.mark.parametrize("title, query", queries())
def test_the_dashboard_asks_for_what_is_written(title, query):
    known = {PREFIX + m.name: {*m.labels, "model_name", "instance"} for m in METRICS} | FOREIGN
    names = re.findall(r"sglang:\w+", query)
    assert names, "a query without a metric"
    for name in names:
        assert name in known, f"{title}: {name} is not written"
    used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query))
    used |= {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
    assert used <= set.intersection(*(known[name] for name in names)), f"{title}: {used}"
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
    for counter in re.findall(r"(sglang:\w+_total)\{", query):
        sure = query.startswith("label_values(") or re.search(rf"rate\({counter}\{{", query)
        assert sure, f"{title}: a counter without rate()"


def test_every_metric_is_on_the_dashboard():
    asked = set(re.findall(r"sglang:adaptive_(\w+)", " ".join(query for _, query in queries())))
    rest = {metric.name for metric in METRICS} - asked
    # The dashboard takes that mean from counters.
    assert rest == {"verify_length"}, "on no panel: add one, or name it here"


def test_the_dashboard_is_in_order():
    board = json.loads(DASHBOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24, "panels lie over each other"
    for panel in panels:
        assert len(panel["description"].split()) >= 6, f"{panel['title']} does not say what to look for"
        assert panel["datasource"]["uid"] == "${datasource}"
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs))


def test_the_table_in_the_documentation_is_the_list_of_metrics():
    text = DASHBOARD.with_name("README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.*) \|$", text, re.MULTILINE)
    assert [(name, tuple(re.findall(r"`(\w+)`", labels)), help) for name, labels, help in rows] == [
        (metric.name, metric.labels, metric.help) for metric in METRICS
    ]
    for name in re.findall(r"sglang:adaptive_(\w+)\b(?!_)", text):
        assert name in {metric.name for metric in METRICS}
