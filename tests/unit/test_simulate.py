"""The commands around the simulator: studies and their reports, sizing times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from sglang_adaptive.benchmarks import simulate, sizing
from sglang_adaptive.benchmarks.simulator import replay, report, study, traffic
from sglang_adaptive.errors import AdaptiveError

K = 7
TRACE = Path(__file__).parents[1] / "data" / "smollm2.trace"
SMALL = ["--tokens-per-user", "60", "--least-tokens", "200", "--seeds", "2", "--jobs", "1"]


@pytest.fixture(autouse=True)
def few_requests(monkeypatch):
    whole = traffic.generate
    monkeypatch.setattr(study.traffic, "generate", lambda kind, gamma, seed: whole(kind, gamma, seed, requests=32))
    study.pool.cache_clear()
    yield
    study.pool.cache_clear()


def test_a_study_writes_table_numbers_and_picture(tmp_path):
    out = tmp_path / "results" / "study"
    arms = "none;fixed-1;fixed-7;stock;ours;ours:objective=rate;clairvoyant"
    options = ["--concurrency", "1,8", "--arms", arms, "--wrong", "exact,flatter head+30", "--out", str(out)]
    assert simulate.main([*SMALL, *options]) == 0
    text = out.with_suffix(".md").read_text()
    assert "## ours: v4-pro-8xb300, mixed, flatter head+30" in text and "## ours:objective=rate: summary" in text
    assert "nothing here was measured by us" in text
    found = json.loads(out.with_suffix(".json").read_text())
    # Arms that believe nothing run once, the others once per thing to be wrong about; two loads, two seeds.
    assert len(found["rows"]) == (4 + 3 * 2) * 2 * 2
    row = dict(zip(found["columns"], found["rows"][0], strict=True))
    assert row["concurrency"] == 8 and row["tok_s"] > 0
    assert (tmp_path / "results" / "study-v4-pro-8xb300-mixed.png").stat().st_size > 5000


def test_a_study_goes_on_where_it_ended(tmp_path, monkeypatch):
    out, ran = tmp_path / "study", []
    options = ["--concurrency", "4", "--out", str(out), "--resume", "--arms"]
    assert simulate.main([*SMALL, *options, "none,fixed-2"]) == 0
    before = out.with_suffix(".json").read_text()
    run = study.run_task
    monkeypatch.setattr(study, "run_task", lambda task: ran.append(task.arm) or run(task))
    assert simulate.main([*SMALL, *options, "none,fixed-2,ours"]) == 0
    assert ran == ["ours", "ours"]
    found = json.loads(out.with_suffix(".json").read_text())
    assert len(found["rows"]) == 6 and all(row in found["rows"] for row in json.loads(before)["rows"])
    out.with_suffix(".json").write_text("{}")
    with pytest.raises(AdaptiveError, match="remove it"):
        simulate.main([*SMALL, *options, "none"])


def test_a_study_prints_without_a_file_and_runs_on_several_cores(capsys, monkeypatch):
    assert simulate.main([*SMALL[:-1], "2", "--concurrency", "4", "--arms", "none,fixed-2,ours"]) == 0
    assert "## ours: summary" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--table", "nowhere"],
        ["--traffic", "heavy"],
        ["--arms", "theirs"],
        ["--wrong", "costs-31"],
        ["--concurrency", "0"],
        ["--concurrency", "many"],
        ["--seeds", "0"],
        ["--engines", "4", "--concurrency", "2"],
        ["--arrivals", "0"],
        ["--host-ms", "1,2"],
        ["--host-ms", "1,2,nan"],
        ["--host-ms", "1,2,soon"],
    ],
)
def test_a_study_that_cannot_be_is_refused_before_it_starts(options, monkeypatch):
    monkeypatch.setattr(study, "run_all", lambda *_: pytest.fail("started"))
    with pytest.raises(AdaptiveError):
        simulate.main(options)


def test_an_open_loop_study_reports_latencies():
    scenario = study.Scenario(16, 4000, arrivals_per_s=2.0, engines=2, router="least-loaded", prefill="mixed")
    row = study.run_task(study.Task("v4-pro-8xb300", "mixed", study.EXACT, "ours", scenario, 0))
    assert 0 < row["latency_ms_p50"] <= row["latency_ms_p99"] and row["token_ms_p50"] > 0


def rows(**tok_s):
    return [
        {
            "table": "t",
            "traffic": "m",
            "wrong": "exact",
            "concurrency": 4,
            "arm": arm.replace("_", "-"),
            "seed": seed,
            "tok_s": value,
            "learning_tok_s": value / 2,
        }
        for arm, values in tok_s.items()
        for seed, value in enumerate(values)
    ]


def test_ratios_are_paired_by_seed_and_the_best_fixed_is_best_on_average():
    (cell,) = report.cells(rows(none=[10, 20], fixed_1=[30, 10], fixed_2=[15, 26], ours=[20, 40]))
    assert cell.best_fixed == "fixed-2"
    assert cell.ratio("ours", "none").mean == 2.0 and cell.ratio("ours", "none").half == 0.0
    ratio = cell.ratio("ours", cell.best_fixed)
    assert ratio.mean == pytest.approx((20 / 15 + 40 / 26) / 2)
    # Student's t with one degree of freedom.
    assert ratio.half == pytest.approx(12.71 * abs(20 / 15 - 40 / 26) / 2)
    assert cell.ratio("ours", "clairvoyant") is None
    assert math.isnan(report.Estimate.of([1.0]).half)


def test_the_summary_shows_the_worst_cell_and_the_geometric_mean():
    easy = rows(none=[10], fixed_1=[20], ours=[20])
    hard = [{**row, "concurrency": 64} for row in rows(none=[10], fixed_1=[5], ours=[9])]
    text = "\n".join(report.summary(report.cells(easy + hard), "ours"))
    assert "1.000 (c=4), 1.342" in text and "0.900 (c=64), 1.342" in text


# -- sizing --


def test_sizing_is_timed_after_the_engine_has_learned(capsys, monkeypatch):
    monkeypatch.setattr(sizing, "CASES", ((8, 3),))
    assert sizing.main(["--calls", "20"]) == 0
    assert "| 8 x 3 | sizing, thread CPU time |" in capsys.readouterr().out
    made = sizing.engine(8, 3)
    assert made.cost.is_informative and made.cost.kv_points.size == 16


def test_a_trace_is_replayed_with_what_its_drafts_distributions_say(tmp_path, capsys):
    traces = ",".join([str(TRACE), f"{TRACE}@head+distribution"])
    out = tmp_path / "study"
    options = ["--traffic", traces, "--concurrency", "8", "--arms", "ours", "--out", str(out)]
    assert simulate.main([*SMALL, *options]) == 0
    found = json.loads(out.with_suffix(".json").read_text())
    names = [dict(zip(found["columns"], row, strict=True))["traffic"] for row in found["rows"]]
    assert sorted(set(names)) == ["smollm2.trace", "smollm2.trace@head+distribution"]
    head, both = (replay.from_file(name, 0) for name in traces.split(","))
    assert len(list(tmp_path.glob("*.png"))) == 2
    # The same requests; and what is heard of them separates tokens whose draft passes from the others better.
    assert (head.run == both.run).all()
    passed = head.run > 0
    apart = [float(each[passed, 0].mean() - each[~passed, 0].mean()) for each in (head.confidence, both.confidence)]
    assert apart[1] > apart[0] + 0.02
    odd = tmp_path / "user@host.trace"
    odd.write_bytes(TRACE.read_bytes())
    assert replay.split(str(odd)) == (str(odd), "")
    assert replay.split(f"{odd}@distribution") == (str(odd), "distribution")
    for bad in (f"{TRACE}@nothing", "nowhere@distribution"):
        with pytest.raises(AdaptiveError, match="There is no trace"):
            simulate.main(["--traffic", bad])
