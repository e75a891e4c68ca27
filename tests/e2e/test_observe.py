"""Metrics, the live view and the report on a real server, and a disk that runs full under its trace."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import costs
import pytest
from conftest import PROMPTS, TOKENS
from server import Server, speculative

from sglang_adaptive.observe.metrics import METRICS, PREFIX
from sglang_adaptive.runtime.trace_reader import read_trace

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 1 MiB of its own, or a plain folder where nobody may mount one."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except OSError:
        mounted = False
    yield folder
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)


@pytest.fixture(scope="module")
def server(tiny_pair: tuple[Path, Path], dear_costs: Path, small_disk: Path, log_dir: Path) -> Iterator[Server]:
    """The tiny pair with metrics and a trace."""
    target, draft = tiny_pair
    environment = costs.environment(dear_costs, trace=str(small_disk / "trace"))
    arguments = (*speculative(draft), "--enable-metrics", "--decode-log-interval", "8", "--sleep-on-idle")
    with Server(target, *arguments, log_dir=log_dir, environment=environment) as running:
        yield running


def until(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def series(metrics: dict[str, float], name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Values of one of our metrics by its own labels; every series must have the host's."""
    own = {metric.name: metric.labels for metric in METRICS}[name]
    found = {}
    for key, value in metrics.items():
        if key.startswith(f"{PREFIX}{name}{{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', key))
            assert labels["model_name"] and labels["tp_rank"] == "0"
            found[tuple((label, labels[label]) for label in own)] = value
    return found


def command(*arguments: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "sglang_adaptive", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def test_metrics_are_those_of_server_info(server: Server, expected_ids):
    for count in (1, 3, 24):
        assert server.greedy_ids(PROMPTS[:count], TOKENS) == expected_ids[:count]

    def in_step() -> bool:
        written = series(server.metrics(), "committed_tokens_total")
        return sum(written.values()) == server.adaptive_state()["committed_tokens"]

    assert until(in_step), "an idle server did not write what its last steps did"
    state, metrics = server.adaptive_state(), server.metrics()
    assert {metric.name for metric in METRICS if series(metrics, metric.name)} == {metric.name for metric in METRICS}
    for name, reason in (("steps_total", "decisions"), ("fallbacks_total", "fallbacks")):
        assert {labels[0][1]: value for labels, value in series(metrics, name).items()} == state[reason]
    for name, position in (("verified_drafts_total", "verified"), ("accepted_drafts_total", "accepted")):
        values = {int(labels[0][1]): value for labels, value in series(metrics, name).items()}
        assert [values[j] for j in sorted(values)] == state[f"{position}_per_position"]
    for name, field in (("drafted_tokens_total", "drafted_tokens"), ("wasted_tokens_total", "wasted_tokens")):
        assert series(metrics, name)[()] == state[field] > 0
    for name, field in (("measured_step_seconds_total", "measured_ms"), ("step_error_seconds_total", "error_ms")):
        assert series(metrics, name)[()] == pytest.approx(state["step_time"][field] / 1e3) and state["step_time"][field]
    loads = {labels[0][1]: value for labels, value in series(metrics, "verify_tokens_total").items()}
    assert loads == {load: sums["verify_tokens"] for load, sums in state["by_load"].items()}
    assert {"1", "2", "16"} <= set(loads)
    assert series(metrics, "calibration_error")[()] == pytest.approx(state["calibration"]["error"])
    assert series(metrics, "ragged_verify")[()] == 1
    assert state["steps"] == sum(state["decisions"].values()) and state["decisions"]["trimmed"] > 0
    assert any(key.startswith("sglang:num_running_reqs{") for key in metrics), "the host's own metrics are gone"


def test_the_live_view_with_metrics_and_without(server: Server, adaptive_server: Server, tiny_plain_server: Server):
    for each in (server, adaptive_server):
        each.greedy_ids(PROMPTS[:2], 8)
        done = command("top", each.client.url, "--once", "--interval", "0.5")
        assert done.returncode == 0, done.stderr
        length = f"{each.adaptive_state()['verify_length']:.2f}"
        assert re.search(rf"verified .*{length}", done.stdout) and "trimmed" in done.stdout
    done = command("top", tiny_plain_server.client.url, "--once")
    assert done.returncode == 1 and "does not speculate" in done.stderr and done.stderr.count("\n") == 1


def test_the_report_of_its_trace(server: Server, small_disk: Path, tmp_path: Path):
    server.greedy_ids(PROMPTS[:4], 16)
    trace = small_disk / "trace"
    assert until(lambda: len(read_trace(trace).steps) == server.adaptive_state()["steps"]), "steps are missing"
    state, found = server.adaptive_state(), read_trace(trace)
    assert found.rows["accepted"].sum() == state["accepted_tokens"] and not found.lost
    done = command("report", trace, "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.html").read_text()
    for name in ("budget-time", "budget-load", "pareto", "decisions", "cost", "waste", "calibration-1"):
        assert f'id="chart-{name}"' in text, name
    assert f"<b>{state['steps']:,}</b>" in text and found.meta["model"] in text


def test_a_full_disk_ends_the_trace_and_nothing_else(server: Server, small_disk: Path, tmp_path: Path, expected_ids):
    if not small_disk.is_mount():
        pytest.skip("A FULL DISK WAS NOT TRIED: mounting a small file system needs root.")
    recorded = len(read_trace(small_disk / "trace").steps)
    with open(small_disk / "ballast", "wb", buffering=0) as ballast, pytest.raises(OSError) as full:
        while True:
            ballast.write(bytes(512))
    assert full.value.errno == errno.ENOSPC
    before = server.adaptive_state()["steps"]
    complaint = "Cannot write the trace"
    for _ in range(8):
        assert server.greedy_ids(PROMPTS[:12], TOKENS) == expected_ids[:12]
        if complaint in server.log_text():
            break
    assert until(lambda: complaint in server.log_text(), 10)
    assert server.greedy_ids(PROMPTS[:12], TOKENS) == expected_ids[:12]
    assert server.adaptive_state()["steps"] > before
    time.sleep(2)
    assert server.log_text().count(complaint) == 1 and "Traceback" not in server.log_text()
    done = command("report", small_disk / "trace", "-o", tmp_path / "page.html")
    assert done.returncode == 0 and len(read_trace(small_disk / "trace").steps) >= recorded, done.stderr
