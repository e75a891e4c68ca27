"""Sessions of several steps, greedy equality and step times of servers that they start."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from sglang_adaptive.benchmarks import config, equality, session, steptime, trace_syncs
from sglang_adaptive.benchmarks.equality import agreement
from sglang_adaptive.errors import AdaptiveError
from tests.fake_server import trace_events
from tests.unit.test_benchmarks_sweep import ARMS, no_server_is_left, written


def script(text: str) -> list[str]:
    return ["{python}", "-c", text]


def steps_file(folder: Path, *steps: dict) -> Path:
    path = folder / "session.toml"
    lines = []
    for step in steps:
        lines.append("[[steps]]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in step.items() if key != "env"]
        if "env" in step:
            lines.append("env = { " + ", ".join(f"{k} = {json.dumps(v)}" for k, v in step["env"].items()) + " }")
    path.write_text("\n".join(lines) + "\n")
    return path


def run(path: Path, out: Path, *more: str) -> int:
    return session.main(["--config", str(path), "--out", str(out), *more])


def test_a_session_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    """One step is done at once, one needs a second call, one fails and does not stop the others."""
    monkeypatch.setenv("GREETING", "hello")
    out = tmp_path / "out"
    again = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); n = p.exists(); p.touch(); sys.exit(0 if n else 3)"
    path = steps_file(
        tmp_path,
        {
            "name": "quick",
            "minutes": 1.0,
            "command": script("import os; print(os.environ['WORD'])"),
            "env": {"WORD": "$GREETING"},
        },
        {"name": "twice", "minutes": 1.0, "command": [*script(again), "{out}/mark"], "then": script("print('shown')")},
        {"name": "broken", "minutes": 1.0, "command": script("raise SystemExit(5)")},
    )
    assert run(path, out) == session.INCOMPLETE
    text = capsys.readouterr().out
    assert (
        "hello" in text and "shown" in text and "twice: not finished" in text and "broken: FAILED with status 5" in text
    )
    assert {name: step["status"] for name, step in json.loads((out / "session.json").read_text()).items()} == {
        "quick": 0,
        "twice": 3,
        "broken": 5,
    }
    assert run(path, out, "--only", "quick", "twice") == 0
    text = capsys.readouterr().out
    assert "hello" not in text and "twice: done" in text
    assert (out / "quick.log").read_text() == "hello\n"


def test_a_dry_run_says_what_would_be_run_and_runs_nothing(tmp_path, capsys):
    path = steps_file(
        tmp_path,
        {"name": "table", "minutes": 2.0, "command": ["shapes", "--out", "{out}", "small"], "env": {"A": "b c"}},
    )
    assert run(path, tmp_path / "out", "--dry-run") == 0
    text = capsys.readouterr().out
    assert f"A='b c' {sys.executable} -m sglang_adaptive.benchmarks shapes --out {tmp_path}/out small" in text
    assert list((tmp_path / "out").iterdir()) == []


def test_a_step_that_outstays_its_time_is_ended_and_no_step_begins_without_time(tmp_path, capsys, monkeypatch):
    path = steps_file(tmp_path, {"name": "slow", "minutes": 0.001, "command": script("import time; time.sleep(60)")})
    run_it = session._run
    monkeypatch.setattr(session, "_run", lambda command, env, log, seconds: run_it(command, env, log, seconds - 29.5))
    begin = time.monotonic()
    assert run(path, tmp_path / "out") == session.INCOMPLETE
    assert time.monotonic() - begin < 25
    path = steps_file(tmp_path, {"name": "later", "minutes": 5.0, "command": script("print('ran')")})
    capsys.readouterr()
    assert run(path, tmp_path / "other", "--minutes", "0.1") == session.INCOMPLETE
    text = capsys.readouterr().out
    assert "no time left" in text and not (tmp_path / "other" / "later.log").exists()


def test_wrong_sessions_are_refused(tmp_path):
    with pytest.raises(AdaptiveError, match="is no session"):
        session.read(steps_file(tmp_path, {"name": "a", "command": ["b"]}))
    step = {"name": "a", "minutes": 1.0, "command": ["$NO_SUCH_VARIABLE"]}
    with pytest.raises(AdaptiveError, match="two steps one name"):
        session.read(steps_file(tmp_path, step, step))
    with pytest.raises(AdaptiveError, match="variable that is not set"):
        run(steps_file(tmp_path, step), tmp_path / "out")


def test_agreement_counts_equal_answers_and_tokens_before_a_difference():
    found = agreement([[1, 2, 3], [1, 2, 3], [4]], [[1, 2, 3], [1, 9, 3], [5]])
    assert (found.prompts, found.equal, found.prefix) == (3, 1, pytest.approx(4 / 3))


def test_greedy_tokens_are_compared_with_the_arm_before_and_resumed(tmp_path, capsys):
    arms = [
        {"name": "static", "args": []},
        {"name": "ours", "role": "ours", "args": ["--adaptive"]},
        {"name": "odd", "role": "ours", "args": ["--adaptive", "--odd", "2"]},
        {"name": "dead", "role": "ours", "args": ["--refuse", "no such backend"]},
    ]
    path = written(tmp_path, arms, resident=3)
    command = ["--config", str(path), "--out", str(tmp_path / "out"), "--prompts", "12", "--tokens", "9"]
    assert equality.main([*command, "--stop-after", "0"]) == equality.INCOMPLETE
    assert equality.main(command) == 0
    text = capsys.readouterr().out
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert "12/12 equal, 9.0 tokens" in rows["ours"] and "trimmed" in rows["ours"]
    assert rows["odd"].count("12/12 equal") == 1, "the control is equal, the odd arm is not"
    assert "failed: ServerFailed" in rows["dead"]
    begin = time.monotonic()
    assert equality.main(command) == 0
    assert time.monotonic() - begin < 5, "what was answered is not asked again"
    assert no_server_is_left()
    with pytest.raises(AdaptiveError, match="no arm before it"):
        equality.pairs(config.read(written(tmp_path, [arms[1], arms[0]])))


def test_step_times_of_servers_that_it_starts(tmp_path, capsys):
    path = written(tmp_path, ARMS)
    out = tmp_path / "steptime.json"
    options = ["--rounds", "1", "--tokens", "16", "--logs", str(tmp_path), "--json", str(out)]
    traces = ["--trace-steps", "4", "--trace-dir", str(tmp_path / "traces")]
    assert steptime.main(["--config", str(path), "--arms", "none", "ours", *options, *traces]) == 0
    found = json.loads(out.read_text())
    assert list(found["servers"]) == ["none", "ours"] and found["servers"]["none"]["ms_per_step"] >= 10
    assert found["traces"]["ours"]["steps"] == 3
    assert "GPU idle, ms" in capsys.readouterr().out
    assert no_server_is_left()
    with pytest.raises(AdaptiveError, match="k9 is no arm of small"):
        steptime.main(["--config", str(path), "--arms", "k9"])
    with pytest.raises(SystemExit):
        steptime.main(["--config", str(path), "--arms", "none", "--url", "http://nowhere"])


def test_the_idle_time_of_the_gpu_is_what_no_kernel_fills():
    found = trace_syncs.per_step([event for event in trace_events(5) if event["ph"] == "X"])
    assert found["ms"] == pytest.approx(1.0) and found["gpu_busy_ms"] == pytest.approx(0.61)
    assert "| GPU idle, ms | 0.39 |" in trace_syncs.table({"a": found})
