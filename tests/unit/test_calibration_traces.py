"""Scores of confidences on recorded traces, and the features that the traces are recorded with."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_adaptive.benchmarks import calibration
from sglang_adaptive.benchmarks.calibration_methods import Steps, trimmed
from sglang_adaptive.benchmarks.calibration_scores import (
    Outcomes,
    auc,
    ece_over_requests,
    equal_bins,
    scores,
    unbiased_rms,
)
from sglang_adaptive.benchmarks.simulator.tables import load_table
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.runtime.relay import StepRecord, StepRelay
from sglang_adaptive.runtime.trace import TraceRecorder, describe, read_trace
from sglang_adaptive.runtime.trace_features import DraftFeatures, draft_columns, watch_drafts, width

K = 3


def write(tmp_path, count=120, requests=16, bias=2.0, features=False):
    """A trace of drafts whose head is overconfident by ``bias`` in log-odds, all of them verified."""
    rng = np.random.default_rng(0)
    recorder = TraceRecorder(tmp_path / "trace", K)
    for n in range(count):
        odds = rng.normal(0.5, 1.5, (requests, K))
        raw = 1 / (1 + np.exp(-(odds + bias)))
        passed = np.logical_and.accumulate(rng.random(odds.shape) < 1 / (1 + np.exp(-odds)), axis=1).sum(axis=1)
        lens = np.full(requests, K + 1), passed + 1
        temperature = np.arange(requests)[:, None] % 2 * 0.5
        extra = np.hstack([1 / (1 + np.exp(-odds)), np.ones_like(odds), odds, temperature])
        record = StepRecord(n, np.arange(requests), np.full(requests, n // 10), 1.0, raw, *lens, 1.0)
        recorder.record(replace(record, extra=extra) if features else record, None)
    recorder.close()


def steps(tmp_path, **options):
    write(tmp_path, **options)
    return Steps.of(read_trace(tmp_path / "trace"))


def test_an_overconfident_head_is_corrected_online(tmp_path):
    found = calibration.evaluate(steps(tmp_path))
    raw, online = found["raw head"]["1"], found["online"]["1"]
    assert raw["ece"] > 0.2 and online["ece"] < 0.06
    assert online["above_raw"] == 0.0 and raw["ece_low"] < raw["ece"] < raw["ece_high"]
    assert found["map in hindsight"]["1"]["brier"] <= online["brier"]
    assert online["brier"] < raw["brier"] and online["auc"] == pytest.approx(raw["auc"], abs=0.01)
    assert found["position means"]["1"]["auc"] < 0.6 < found["online"]["1"]["auc"]
    assert "headless" not in found and "greedy" not in found["online"]


def test_the_headless_estimator_is_scored_where_the_trace_has_its_features(tmp_path):
    found = calibration.evaluate(steps(tmp_path, features=True))
    assert found["headless"]["1"]["auc"] > 0.7 and found["headless"]["1"]["ece"] < 0.06
    counts = [found["headless"][label]["n"] for label in ("greedy", "sampled", "all")]
    assert counts[0] + counts[1] == counts[2] and min(counts) > 500


def test_greedy_and_sampled_requests_can_be_told_apart_and_put_together(tmp_path):
    whole = steps(tmp_path, count=20, features=True)
    greedy, sampled, mixed = (calibration.VIEWS[name](whole) for name in ("greedy", "sampled", "mixed"))
    assert {len(each) for of in (greedy, sampled) for each in of.raw} == {8} and len(greedy) == len(mixed) == 20
    assert all((each == 0).all() for each in greedy.temperature)
    assert all((each > 0).all() for each in sampled.temperature)
    assert all(len(set(each)) == 16 for each in mixed.slots)
    for each, first, second in zip(mixed.raw, greedy.raw, sampled.raw, strict=True):
        np.testing.assert_array_equal(each, np.concatenate([first, second]))


def test_what_is_judged_can_be_chosen(tmp_path):
    whole = steps(tmp_path)
    late = calibration.evaluate(whole, slice(100, 120))
    assert late["raw head"]["1"]["n"] == 20 * 16
    assert calibration.by_default(whole) == slice(30, 120)


def test_scores_of_known_predictions():
    predicted, passed = np.array([0.0, 0.0, 1.0, 1.0]), np.array([False, False, True, True])
    assert auc(predicted, passed) == 1.0 and auc(np.full(4, 0.5), passed) == 0.5
    assert math.isnan(auc(predicted, np.ones(4, bool)))
    found = scores(Outcomes(np.full(1000, 0.75), np.arange(1000) % 2 == 0, np.arange(1000)))
    assert found["brier"] == pytest.approx(0.3125) and found["ece"] == pytest.approx(0.25)
    assert found["rms"] == pytest.approx(0.25, abs=0.01)
    assert 0.005 < found["chance"] < found["chance_high"] < 0.06


def test_chance_is_taken_out_of_the_mean_square():
    rng = np.random.default_rng(2)
    predicted = rng.random(400)
    squares = []
    for _ in range(200):
        of = Outcomes(predicted, rng.random(400) < predicted, np.arange(400))
        bins = equal_bins(of.predicted)
        squares.append(unbiased_rms(of.predicted, of.passed, bins) ** 2)
    # Half of the estimates are cut at 0, so a little is left of the chance, 0.004 without the correction.
    assert np.mean(squares) < 0.001


def test_the_interval_draws_requests_not_outcomes():
    rng = np.random.default_rng(1)
    rate = rng.choice([0.1, 0.9], 40)
    request = np.repeat(np.arange(40), 50)
    of = Outcomes(np.full(2000, 0.5), rng.random(2000) < rate[request], request)
    apart = replace(of, request=np.arange(2000))
    spread, narrow = (np.std(ece_over_requests(each, equal_bins(each.predicted))) for each in (of, apart))
    assert spread > 3 * narrow


def test_only_decided_drafts_count(tmp_path):
    found = steps(tmp_path, count=8)
    for known, accepted in zip(found.decided(), found.accepted, strict=True):
        assert known.sum(axis=1).tolist() == np.minimum(accepted + 1, K).tolist()


def test_trimmed_steps_hide_outcomes_and_the_correction_still_learns(tmp_path):
    whole, cost = steps(tmp_path, requests=64, bias=0.5), load_table("v4-pro-8xb300")[0]
    less = trimmed(whole, cost)
    sent = [sum(int(each.sum()) for each in of.verified) for of in (less, whole)]
    assert 0.2 * sent[1] < sent[0] < 0.9 * sent[1]
    for mine, before, seen in zip(less.accepted, whole.accepted, less.verified, strict=True):
        assert (mine == np.minimum(before, seen)).all()
    found = calibration.evaluate(whole, cost=cost)
    assert found["online"]["all"]["n"] == found["raw head"]["all"]["n"]
    assert found["online"]["1"]["ece"] < 0.03 < found["raw head"]["1"]["ece"]


def test_the_command_writes_numbers_and_a_picture(tmp_path, capsys):
    write(tmp_path, features=True)
    files = ["--json", str(tmp_path / "out.json"), "--picture", str(tmp_path / "out.png")]
    assert calibration.main([str(tmp_path / "trace"), "--judge", "60:", *files]) == 0
    shown = capsys.readouterr().out
    assert "| online | all |" in shown and "judged are steps 60 to 120" in shown
    assert json.loads((tmp_path / "out.json").read_text())["trace"]["online"]["1"]["n"] == 60 * 16
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_without_drafts_is_refused(tmp_path):
    recorder = TraceRecorder(tmp_path / "trace", K)
    ones = np.ones(2, int)
    recorder.record(StepRecord(0, np.arange(2), ones, 1.0, None, ones, ones, 1.0), None)
    recorder.close()
    with pytest.raises(AdaptiveError, match="no step that drafted"):
        calibration.main([str(tmp_path / "trace")])


# -- what is recorded of the draft distributions --


def test_draft_columns_describe_the_distribution_that_is_drawn_from():
    logits = torch.tensor([[[0.0, 1.0, 3.0, -math.inf]], [[2.0, 2.0, 2.0, 2.0]]])
    columns = draft_columns(logits, torch.tensor([0.5, 1.0]), torch.tensor([False, True])).numpy()
    assert columns.shape == (2, width(1))
    found = DraftFeatures.of(columns, 1)
    p = np.exp([0.0, 2.0, 6.0]) / np.exp([0.0, 2.0, 6.0]).sum()
    np.testing.assert_allclose(found.max_probability[:, 0], [p.max(), 0.25], rtol=1e-5)
    np.testing.assert_allclose(found.entropy[:, 0], [-(p * np.log(p)).sum(), math.log(4)], rtol=1e-5)
    np.testing.assert_allclose(found.margin[:, 0], [4.0, 0.0], atol=1e-5)
    assert found.temperature.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("greedy_server", [False, True])
def test_a_watched_proposer_drafts_as_before(greedy_server):
    logits = None if greedy_server else torch.zeros(2, K, 5)
    block = SimpleNamespace(corrected_logits=logits, temperatures=torch.ones(2), greedy_mask=torch.ones(2).bool())
    proposal = SimpleNamespace(draft_block=block)
    proposer, seen = SimpleNamespace(propose=lambda **given: (proposal, given)[0]), []
    watch_drafts(proposer, seen.append)
    assert proposer.propose(batch=1) is proposal
    assert [each.shape for each in seen] == ([] if greedy_server else [(2, width(K))])


def test_extra_columns_travel_with_the_step():
    relay = StepRelay(num_slots=8, gamma=K, max_requests=2, device="cpu", lag=1, extra=width(K))
    lens = torch.tensor([4, 4, 4]), torch.tensor([2, 1, 4])
    confidence, extra = torch.rand(3, K), torch.rand(3, width(K))
    owners = {"slots": np.arange(3), "generations": np.zeros(3, int), "kv_tokens": 1.0}
    sent = {"confidence": confidence, "verify_lens": lens[0], "commit_lens": lens[1]}
    for iteration, more in enumerate((extra, None)):
        relay.publish(iteration=iteration, **owners, **sent, tier=16, extra=more)
        (record,) = relay.collect(iteration + 1)
        np.testing.assert_array_equal(record.confidence, confidence)
        assert record.commit_lens.tolist() == [2, 1, 4] and record.tier == 16
        assert (record.extra is None) == (more is None)
        if more is not None:
            np.testing.assert_array_equal(record.extra, extra)


def test_a_trace_names_the_server_without_its_paths():
    arguments = SimpleNamespace(model_path="/somewhere/target", speculative_draft_model_path="a/draft")
    found = describe(SimpleNamespace(server_args=arguments, device="cpu", dtype=torch.float32))
    assert (found["model"], found["draft"], found["device"], found["dtype"]) == ("target", "draft", "cpu", "float32")
