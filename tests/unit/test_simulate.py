"""The commands around the simulator: studies and their reports, calibration scores, sizing times."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from sglang_adaptive.benchmarks import calibration, simulate, sizing
from sglang_adaptive.benchmarks.simulator import report, study, traffic
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.runtime.relay import StepRecord
from sglang_adaptive.runtime.trace import TraceRecorder, read_trace

K = 7
SMALL = ["--tokens-per-user", "60", "--least-tokens", "200", "--seeds", "2", "--jobs", "1"]


@pytest.fixture(autouse=True)
def few_requests(monkeypatch):
    whole = traffic.generate
    monkeypatch.setattr(study.traffic, "generate", lambda kind, gamma, seed: whole(kind, gamma, seed, requests=32))
    study._pool.cache_clear()
    yield
    study._pool.cache_clear()


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


# -- calibration --


def steps(tmp_path, count=120, requests=16, bias=2.0, features=False):
    """A trace of drafts whose head is overconfident by ``bias`` in log-odds, all of them verified."""
    rng = np.random.default_rng(0)
    recorder = TraceRecorder(tmp_path / "trace", 3)
    for n in range(count):
        odds = rng.normal(0.5, 1.5, (requests, 3))
        raw = 1 / (1 + np.exp(-(odds + bias)))
        passed = np.logical_and.accumulate(rng.random(odds.shape) < 1 / (1 + np.exp(-odds)), axis=1).sum(axis=1)
        lens = np.full(requests, 4), passed + 1
        extra = np.hstack([1 / (1 + np.exp(-odds)), np.ones_like(odds), odds, np.zeros((requests, 1))])
        record = StepRecord(n, np.arange(requests), np.zeros(requests), 1.0, raw, *lens, 1.0)
        recorder.record(replace(record, extra=extra) if features else record, None)
    recorder.close()
    return calibration.Steps.of(read_trace(tmp_path / "trace"))


def test_an_overconfident_head_is_corrected_online(tmp_path):
    found = calibration.evaluate(steps(tmp_path))
    raw, online = found["raw head"]["1"], found["online"]["1"]
    assert raw["ece"] > 0.2 and online["ece"] < 0.06
    assert online["brier"] < raw["brier"] and online["auc"] == pytest.approx(raw["auc"], abs=0.01)
    assert found["position means"]["1"]["auc"] < 0.6 < found["online"]["1"]["auc"]
    assert "headless" not in found


def test_the_headless_estimator_is_scored_where_the_trace_has_its_features(tmp_path):
    found = calibration.evaluate(steps(tmp_path, features=True))
    assert found["headless"]["1"]["auc"] > 0.7 and found["headless"]["1"]["ece"] < 0.06


def test_scores_of_known_predictions():
    predicted, passed = np.array([0.0, 0.0, 1.0, 1.0]), np.array([False, False, True, True])
    assert calibration.auc(predicted, passed) == 1.0 and calibration.auc(np.full(4, 0.5), passed) == 0.5
    assert math.isnan(calibration.auc(predicted, np.ones(4, bool)))
    found = calibration.scores(np.full(1000, 0.75), np.arange(1000) % 2 == 0)
    assert found["brier"] == pytest.approx(0.3125) and found["ece"] == pytest.approx(0.25)
    assert found["floor"] < 0.06


def test_only_decided_drafts_count(tmp_path):
    known = steps(tmp_path, count=8).decided()
    for each, accepted in zip(known, steps(tmp_path, count=8).accepted, strict=True):
        assert each.sum(axis=1).tolist() == np.minimum(accepted + 1, 3).tolist()


def test_the_calibration_command(tmp_path, capsys):
    steps(tmp_path)
    assert calibration.main([str(tmp_path / "trace"), "--json", str(tmp_path / "out.json")]) == 0
    assert "| online | all |" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["trace"]["online"]["1"]["n"] > 1000


def test_a_trace_without_drafts_is_refused(tmp_path):
    recorder = TraceRecorder(tmp_path / "trace", 3)
    ones = np.ones(2, int)
    recorder.record(StepRecord(0, np.arange(2), ones, 1.0, None, ones, ones, 1.0), None)
    recorder.close()
    with pytest.raises(AdaptiveError, match="no step that drafted"):
        calibration.main([str(tmp_path / "trace")])


# -- sizing --


def test_sizing_is_timed_after_the_engine_has_learned(capsys, monkeypatch):
    monkeypatch.setattr(sizing, "CASES", ((8, 3),))
    assert sizing.main(["--calls", "20"]) == 0
    assert "| 8 x 3 | CPU time of the thread |" in capsys.readouterr().out
    made = sizing.engine(8, 3)
    assert made.cost.is_informative and made.cost.kv_points.size == 16
