"""What calibration and estimator reach on the recorded trace of a real pair; a regression of either shows here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sglang_adaptive.benchmarks import calibration
from sglang_adaptive.benchmarks.calibration_methods import METHODS, Steps, trimmed
from sglang_adaptive.benchmarks.calibration_scores import auc, ece, equal_bins
from sglang_adaptive.benchmarks.simulator.tables import load_table
from sglang_adaptive.runtime.trace import read_trace

TRACE = Path(__file__).parents[1] / "data" / "smollm2.trace"


@pytest.fixture(scope="module")
def whole():
    return Steps.of(read_trace(TRACE))


def scores(steps, *names, seen=None):
    """By method and label: ECE, AUC and Brier score."""
    judged = calibration.Judged(steps, calibration.by_default(steps))
    return {
        name: {
            label: {
                "ece": ece(of.predicted, of.passed, equal_bins(of.predicted)),
                "auc": auc(of.predicted, of.passed),
                "brier": float(np.mean((of.predicted - of.passed) ** 2)),
            }
            for label, of in judged.outcomes(METHODS[name](seen or steps, judged.steps.start)).items()
        }
        for name in names
    }


@pytest.mark.parametrize("view", ["greedy", "sampled", "mixed"])
def test_the_head_is_corrected(whole, view):
    found = scores(calibration.VIEWS[view](whole), "raw head", "online")
    assert found["online"]["all"]["ece"] < 0.02
    assert found["online"]["all"]["brier"] < found["raw head"]["all"]["brier"]
    for position in "1234":
        assert found["online"][position]["brier"] < found["raw head"][position]["brier"] + 0.0015


def test_drafts_without_a_head_are_told_apart(whole):
    found = scores(calibration.VIEWS["greedy"](whole), "position means", "raw head", "headless")
    assert found["headless"]["all"]["auc"] > 0.80 and found["headless"]["all"]["ece"] < 0.03
    assert found["position means"]["all"]["auc"] < 0.56
    assert found["headless"]["all"]["brier"] < found["raw head"]["all"]["brier"] - 0.02


def test_greedy_and_sampled_requests_in_one_batch_are_both_right(whole):
    found = scores(calibration.VIEWS["mixed"](whole), "headless, no temperature", "headless")
    for label in ("greedy", "sampled"):
        assert found["headless"][label]["ece"] < 0.03 < found["headless, no temperature"][label]["ece"]


def test_what_is_learned_from_trimmed_steps_holds_for_what_was_trimmed(whole):
    cost = load_table("v4-pro-8xb300")[0]
    seen = trimmed(whole, cost)
    assert np.concatenate(seen.verified).mean() < 2.0
    found = scores(whole, "raw head", "online", "headless", seen=seen)
    assert found["online"]["all"]["ece"] < 0.025 and found["headless"]["all"]["ece"] < 0.035
    for name in ("online", "headless"):
        assert found[name]["all"]["brier"] < found["raw head"]["all"]["brier"]
