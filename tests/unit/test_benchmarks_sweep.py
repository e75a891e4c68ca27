"""Sweeps against servers that decode by sleeping: order, resuming, failing arms, time limits, and the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_adaptive.benchmarks import config, report, session, sweep
from sglang_adaptive.benchmarks.compare import Results, best_single, standing
from sglang_adaptive.benchmarks.plan import Cell, Clock, Rows, remaining, stages
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.launch.process import free_port
from tests import fake_server

FAKE = [sys.executable, fake_server.__file__]
SYNTHETIC = {"synthetic": {"token_ids": [10, 99], "length": [3, 5]}}
ARMS = [
    {"name": "none", "role": "none", "args": ["--step-ms", "10"]},
    {"name": "k1", "role": "fixed", "args": ["--step-ms", "10", "--accept", "2"]},
    {"name": "ours", "role": "ours", "args": ["--step-ms", "10", "--accept", "4", "--adaptive"]},
]


def written(folder: Path, arms: list[dict[str, Any]] = ARMS, **changes: Any) -> Path:
    data = {
        "name": "small",
        "server": FAKE,
        "prompts": SYNTHETIC,
        "concurrency": [1, 3],
        "repeats": 2,
        "seconds": 0.4,
        "min_seconds": 0.2,
        "warmup_seconds": 0.1,
        "output_tokens": [20, 30],
        "port": free_port(),
        "start_timeout": 30,
        "start_estimate": 1.0,
    }
    path = folder / "sweep.json"
    path.write_text(json.dumps(data | changes | {"arms": arms}))
    return path


def small(arms: int = 3, **changes: Any) -> config.Sweep:
    return config.Sweep("s", [config.Arm(f"a{number}") for number in range(arms)], SYNTHETIC, **changes)


def run(path: Path, out: Path, *more: str) -> int:
    return sweep.main(["--config", str(path), "--out", str(out), *more])


def cells(out: Path) -> list[tuple[str, int, int]]:
    return [
        (row["arm"], row["concurrency"], row["repeat"])
        for row in Rows(out / "results.jsonl").read()
        if row["kind"] == "cell"
    ]


def starts(out: Path, arm: str) -> int:
    return (out / "logs" / f"{arm}.log").read_text().count("$ ")


def no_server_is_left(patience_s: float = 20.0) -> bool:
    """A killed process takes a moment to go, on a busy machine a longer one."""
    deadline = time.monotonic() + patience_s
    while _a_server_runs():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _a_server_runs() -> bool:
    running = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout
    return any(
        fake_server.__file__ in line and str(os.getpid()) not in line and not line.startswith("Z")
        for line in running.splitlines()
    )


def test_one_server_at_a_time_starts_once_per_repeat_and_the_first_arm_changes():
    order = stages(small(concurrency=[1, 8], repeats=2))
    assert [[arm.name for arm in stage.arms] for stage in order] == [["a0"], ["a1"], ["a2"], ["a1"], ["a2"], ["a0"]]
    assert order[3].cells == [Cell("a1", 1, 1), Cell("a1", 8, 1)]


def test_resident_servers_start_once_and_alternate_per_cell():
    (stage,) = stages(small(2, concurrency=[1, 8], repeats=2, resident=2))
    assert [tuple(cell) for cell in stage.cells] == [
        ("a0", 1, 0),
        ("a1", 1, 0),
        ("a1", 8, 0),
        ("a0", 8, 0),
        ("a1", 1, 1),
        ("a0", 1, 1),
        ("a0", 8, 1),
        ("a1", 8, 1),
    ]
    assert len(stages(small(3, repeats=2, resident=2))) == 4
    assert len(stages(small(3, repeats=2, resident=2, restart=False))) == 2


def test_what_is_done_is_left_out_and_its_server_not_started():
    everything = stages(small(2, concurrency=[1], repeats=1, resident=2))
    (stage,) = remaining(everything, {Cell("a0", 1, 0)})
    assert [arm.name for arm in stage.arms] == ["a1"]
    assert remaining(everything, {Cell("a0", 1, 0), Cell("a1", 1, 0)}) == []

    traced = stages(small(2, concurrency=[8], repeats=1, trace=config.Trace([1])))
    (stage,) = remaining(traced, {Cell("a0", 8, 0), Cell("a1", 8, 0)}, {("a0", 1)})
    assert [arm.name for arm in stage.arms] == ["a1"] and stage.traces == [("a1", 1)]


def test_windows_shrink_evenly_to_the_time_but_not_below_the_least():
    everything = stages(small(2, concurrency=[1, 8], repeats=1))
    clock = Clock(start_estimate=50, settle=2)
    assert clock.window(everything, 128, longest=9, shortest=3) == pytest.approx(5)
    assert clock.window(everything, 1000, longest=9, shortest=3) == 9
    assert clock.window(everything, 60, longest=9, shortest=3) == 3
    assert clock.left(everything, 5) == pytest.approx(128)
    assert clock.left(everything, 5, starting=False) == pytest.approx(78)


def test_a_row_cut_short_by_an_interruption_is_measured_again(tmp_path):
    rows = Rows(tmp_path / "results.jsonl")
    rows.append({"kind": "cell", "arm": "a", "concurrency": 1, "repeat": 0})
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"kind": "cell", "arm": "a", "conc')
    assert rows.done(retry_failed=False) == {Cell("a", 1, 0)}
    rows.append({"kind": "failure", "arm": "a", "concurrency": 8, "repeat": 0})
    assert rows.done(retry_failed=False) == {Cell("a", 1, 0), Cell("a", 8, 0)}
    assert rows.done(retry_failed=True) == {Cell("a", 1, 0)}


def test_a_sweep_measures_everything_resumes_and_is_reported(tmp_path, capsys):
    out = tmp_path / "out"
    path = written(tmp_path, resident=3, pause_idle=True, trace={"concurrency": [3], "steps": 5})
    assert run(path, out, "--repeats", "1", "--concurrency", "1") == 0
    assert len(cells(out)) == 3
    assert run(path, out) == 0
    measured = cells(out)
    assert len(measured) == len(set(measured)) == 12
    assert starts(out, "ours") == 2
    assert run(path, out) == 0
    assert starts(out, "ours") == 2
    assert no_server_is_left()

    rows = Rows(out / "results.jsonl").read()
    assert not any(row.get("errors") for row in rows)
    traces = [row for row in rows if row["kind"] == "trace"]
    assert sorted((row["arm"], row["steps"]) for row in traces) == [("k1", 4), ("none", 4), ("ours", 4)]

    result = tmp_path / "result.md"
    capsys.readouterr()
    assert report.main([str(out), "--result", str(result), "--note", "Sleeping servers."]) == 0
    text = capsys.readouterr().out
    assert text == result.read_text() + "\n"
    assert "Sleeping servers." in text and "sweep --config" in text and "Every server started" in text
    assert result.with_suffix(".png").stat().st_size > 10_000
    data = json.loads(result.with_suffix(".json").read_text())
    (found,) = data["standings"]
    # 4 tokens a step against 2 and 1, on a machine that may be busy
    assert 1.3 < found["geomean"]["fixed"] < 3
    assert 2 < found["geomean"]["none"] < 8
    assert found["best_single"] == "k1" and found["geomean"]["compact"] is None
    assert [point["concurrency"] for point in data["pareto"]["ours"]] == [1, 3]


def test_an_arm_that_fails_does_not_stop_the_others_and_is_not_tried_again_unless_asked(tmp_path, capsys):
    out = tmp_path / "out"
    arms = [{"name": "refuses", "role": "compact", "args": ["--refuse", "no table was given"]}, ARMS[0]]
    path = written(tmp_path, arms, concurrency=[1], repeats=1, trace={"concurrency": [1], "steps": 3})
    assert run(path, out) == 0
    assert cells(out) == [("none", 1, 0)]
    (failure,) = [row for row in Rows(out / "results.jsonl").read() if row["kind"] == "failure"]
    assert "no table was given" in failure["reason"]
    assert run(path, out) == 0
    assert starts(out, "refuses") == 1
    assert run(path, out, "--retry-failed") == 0
    assert starts(out, "refuses") == 2
    report.main([str(out)])
    assert "refuses c=1 repeat 0: the server ended with status 1" in capsys.readouterr().out


def test_a_server_that_dies_fails_its_own_cells_only(tmp_path):
    out = tmp_path / "out"
    path = written(tmp_path, [ARMS[0] | {"args": ["--fail", "30"]}, ARMS[1]], repeats=1, resident=2)
    assert run(path, out) == 0
    assert {arm for arm, *_ in cells(out)} >= {"k1"}
    failures = [row for row in Rows(out / "results.jsonl").read() if row["kind"] == "failure"]
    assert {row["arm"] for row in failures} == {"none"} and "failing as told" in failures[-1]["reason"]
    assert no_server_is_left()


def test_out_of_time_stops_before_a_cell_that_would_not_fit(tmp_path):
    out = tmp_path / "out"
    path = written(tmp_path, concurrency=[1], repeats=1)
    assert run(path, out, "--stop-after", "0.02") == sweep.INCOMPLETE
    assert cells(out) == []
    assert run(path, out, "--minutes", "5") == 0
    assert len(cells(out)) == 3


def test_a_server_that_is_not_up_when_the_time_ends_has_not_failed(tmp_path):
    path = written(
        tmp_path, [{"name": "slow", "args": []}], server=[sys.executable, "-c", "import time; time.sleep(60)"]
    )
    assert run(path, tmp_path / "out", "--stop-after", "0.08") == sweep.INCOMPLETE
    assert Rows(tmp_path / "out" / "results.jsonl").read() == []


def test_a_file_that_an_arm_needs_is_made_once(tmp_path):
    made = tmp_path / "table.json"
    fetch = (
        "import sys, urllib.request as u; open(sys.argv[2], 'wb').write(u.urlopen(sys.argv[1] + '/server_info').read())"
    )
    prepare = {
        "file": str(made),
        "command": [sys.executable, "-c", fetch, "{url}", "{file}"],
        "args": ["--accept", "5"],
    }
    path = written(tmp_path, [ARMS[0] | {"prepare": prepare}], concurrency=[1])
    assert run(path, tmp_path / "out") == 0
    assert json.loads(made.read_text())["internal_states"][0]["avg_spec_accept_length"] == 5
    assert starts(tmp_path / "out", "none") == 2

    broken = ARMS[0] | {"prepare": prepare | {"file": str(tmp_path / "other.json"), "command": ["false"]}}
    assert run(written(tmp_path, [broken], concurrency=[1]), tmp_path / "second") == 0
    assert {row["kind"] for row in Rows(tmp_path / "second" / "results.jsonl").read()} == {"failure"}


@pytest.mark.parametrize("order", [signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_ended_leaves_no_server(tmp_path, order):
    path = written(tmp_path, seconds=30.0)
    command = [sys.executable, "-m", "sglang_adaptive.benchmarks", "sweep", "--config", path, "--out", tmp_path / "out"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "up after" in line:
            break
    process.send_signal(order)
    process.wait(30)
    process.stdout.close()
    deadline = time.monotonic() + 10
    while not no_server_is_left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert no_server_is_left()


def test_a_wrong_configuration_is_refused(tmp_path):
    with pytest.raises(AdaptiveError, match="repeat is no field of Sweep"):
        config.read(written(tmp_path, repeat=3))
    with pytest.raises(AdaptiveError, match="role 'best'"):
        config.read(written(tmp_path, [{"name": "a", "role": "best"}]))
    with pytest.raises(AdaptiveError, match="a name of its own"):
        config.read(written(tmp_path, [ARMS[0], ARMS[0]]))
    with pytest.raises(AdaptiveError, match="variable that is not set"):
        config.read(written(tmp_path, args=["--model-path", "$NO_SUCH_MODEL"]))
    (tmp_path / "empty.toml").write_text('name = "x"\n[[arms]]\nname = "a"\n')
    with pytest.raises(AdaptiveError, match=r"incomplete.*prompts"):
        config.read(tmp_path / "empty.toml")


CONFIGS = Path(config.__file__).parent / "configs"
VARIABLES = ("TARGET", "DRAFT", "PROMPTS", "SPS_TABLE", "SHAPE", "SMOLLM2", "SMOLLM2_DRAFT", "TINY", "TINY_DRAFT")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda p: p.stem)
def test_the_example_configurations_can_be_read(path, monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "/somewhere")
    if path.stem.endswith("session"):
        assert len(session.read(path)) > 3
        return
    found = config.read(path)
    assert any(arm.role == "ours" for arm in found.arms)
    if path.stem in ("smollm2", "dense"):
        assert {"none", "fixed", "compact"} <= {arm.role for arm in found.arms}
        assert len([arm for arm in found.arms if arm.role == "fixed"]) == 4


def test_a_sweep_refuses_a_server_that_does_not_simulate_what_it_wants(tmp_path):
    (tmp_path / "rates.toml").write_text(
        'name = "r"\nsource = "s"\n[[kinds]]\nname = "k"\nshare = 1\nrates = [0.5]\nauc = 0.7\nece = 0.0\n'
    )
    fixed = [
        ARMS[1] | {"name": "stock"},
        ARMS[1] | {"name": "simulating", "args": [*ARMS[1]["args"], "--bench-acceptance"]},
    ]
    simulated = written(tmp_path, [ARMS[0], *fixed], acceptance="rates.toml", concurrency=[1], repeats=1)
    assert run(simulated, tmp_path / "out") == 0
    assert {arm for arm, *_ in cells(tmp_path / "out")} == {"none", "simulating"}
    assert json.loads((tmp_path / "out" / "run.json").read_text())["acceptance"]["name"] == "r"
    assert run(written(tmp_path, fixed, concurrency=[1], repeats=1), tmp_path / "real") == 0
    assert {arm for arm, *_ in cells(tmp_path / "real")} == {"stock"}


def row(arm: str, concurrency: int, repeat: int, tok_s: float) -> dict[str, Any]:
    return {"kind": "cell", "arm": arm, "concurrency": concurrency, "repeat": repeat, "tok_s": tok_s, "tok_s_user": 1.0}


def test_the_best_fixed_length_is_chosen_per_cell_and_for_the_sweep():
    rates = {
        ("k1", 1): (90, 100, 110),
        ("k7", 1): (140, 150, 160),
        ("k1", 64): (1000, 1000, 1000),
        ("k7", 64): (400, 500, 600),
        ("ours", 1): (147, 147, 147),
        ("ours", 64): (950, 1010, 1100),
        ("none", 64): (505, 505, 505),
    }
    rows = [row(*cell, repeat, rate) for cell, each in rates.items() for repeat, rate in enumerate(each)]
    results = Results(rows, {"none": "none", "k1": "fixed", "k7": "fixed", "ours": "ours", "unmeasured": "compact"})
    assert best_single(results, ["k1", "k7"]) == "k1"
    found = standing(results, "ours")
    assert found["cells"][1]["fixed"]["other"] == "k7"
    assert found["cells"][1]["fixed"]["ratio"] == pytest.approx(0.98)
    assert found["cells"][1]["fixed"]["low"] == pytest.approx(147 / 160)
    assert found["cells"][1]["none"] is None
    assert found["cells"][64]["fixed"] == {
        "other": "k1",
        "ratio": pytest.approx(1.01),
        "low": pytest.approx(0.95),
        "high": pytest.approx(1.1),
        "noise": pytest.approx(75 / 1010),
    }
    assert found["geomean"]["fixed_single"] == pytest.approx((1.47 * 1.01) ** 0.5)
    assert found["geomean"]["none"] == pytest.approx(2)
    assert found["below"] == []
    slower = Results(rows + [row("ours", 1, repeat, 100.0) for repeat in range(3)], results.roles)
    assert standing(slower, "ours")["below"] == [("fixed", 1, pytest.approx(100 / 150))]
