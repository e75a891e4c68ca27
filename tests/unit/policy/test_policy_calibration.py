import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_adaptive.policy.allocation import _keys
from sglang_adaptive.policy.calibration import Calibration
from sglang_adaptive.policy.logistic import LogisticFilter, logit, sigmoid

K = 4


def outcomes(random, confidence, truth, verified):
    """Drafts accepted per request when position j passes with probability ``truth(confidence)[j]``."""
    passed = random.random(confidence.shape) < truth(confidence)
    alive = np.logical_and.accumulate(passed, axis=1)
    return np.minimum(alive.sum(axis=1), verified)


def overconfident(confidence):
    """A head whose log-odds are too steep and too high, more so at later positions."""
    shift = np.linspace(-0.4, -1.2, confidence.shape[1])
    return sigmoid(shift + 0.6 * logit(confidence))


def trained(truth, steps=400, requests=16, trim=True, seed=0):
    calibration, random = Calibration(K), np.random.default_rng(seed)
    for _ in range(steps):
        confidence = random.beta(4, 1.5, (requests, K))
        verified = random.integers(0, K + 1, requests) if trim else np.full(requests, K)
        calibration.observe(confidence, verified, outcomes(random, confidence, truth, verified))
    return calibration


def ece(predicted, happened, bins=15):
    index = np.minimum((predicted * bins).astype(int), bins - 1)
    error = 0.0
    for b in range(bins):
        inside = index == b
        if inside.any():
            error += inside.mean() * abs(predicted[inside].mean() - happened[inside].mean())
    return error


def test_identity_until_enough_was_seen():
    calibration = Calibration(K)
    confidence = np.array([[0.0, 0.3, 0.7, 1.0]])
    assert calibration.is_identity and calibration.apply(confidence).tolist() == confidence.tolist()
    for _ in range(16):  # 48 outcomes at position 0: fewer than it wants
        calibration.observe(np.full((3, K), 0.9), np.full(3, 1), np.zeros(3, np.int64))
    assert calibration.is_identity
    for _ in range(16):
        calibration.observe(np.full((3, K), 0.9), np.full(3, 1), np.zeros(3, np.int64))
    got = calibration.apply(np.full((1, K), 0.9))[0]
    assert got[0] < 0.6
    assert got[1:] == pytest.approx([0.9] * (K - 1), abs=1e-6), "positions never reached stay as they are"


def test_an_overconfident_head_is_corrected_at_every_position():
    calibration, random = trained(overconfident, steps=2000), np.random.default_rng(99)
    confidence = random.beta(4, 1.5, (40_000, K))
    happened = random.random(confidence.shape) < overconfident(confidence)
    mapped = calibration.apply(confidence)
    for position in range(K):
        raw = ece(confidence[:, position], happened[:, position])
        assert raw > 0.1
        assert ece(mapped[:, position], happened[:, position]) < 0.02


def test_a_good_head_is_not_made_worse():
    calibration = trained(lambda c: c, steps=1000)
    grid = np.tile(np.linspace(0.05, 0.95, 19)[:, None], (1, K))
    assert np.abs(calibration.apply(grid) - grid).max() < 0.04


def test_later_and_trimmed_drafts_say_nothing():
    """Same outcomes, different values behind the first rejected or the last verified draft: the same map."""
    maps = []
    for filler in (0.01, 0.99):
        calibration = Calibration(K)
        confidence = np.tile([0.8, 0.6, filler, filler], (4, 1))
        for _ in range(32):
            calibration.observe(confidence, np.array([4, 4, 2, 2]), np.array([1, 1, 1, 2]))
        maps.append(calibration.coefficients)
    assert maps[0].tolist() == maps[1].tolist()
    assert not np.array_equal(maps[0][:, :2], [[0, 0], [1, 1]])


def test_the_map_follows_a_change():
    calibration, random = Calibration(1), np.random.default_rng(3)
    for rate in (0.9, 0.3):
        for _ in range(4000):
            passed = (random.random(16) < rate).astype(np.int64)
            calibration.observe(np.full((16, 1), 0.6), np.ones(16, np.int64), passed)
        assert calibration.apply(np.array([[0.6]]))[0, 0] == pytest.approx(rate, abs=0.08)


def test_the_map_always_rises_with_the_confidence():
    """Outcomes that contradict the head must not turn its order around."""
    calibration = trained(lambda c: 1.0 - c)
    grid = np.tile(np.linspace(0.001, 0.999, 200)[:, None], (1, K))
    assert (np.diff(calibration.apply(grid), axis=0) >= 0).all()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([np.nan, np.inf, -np.inf, -1.0, 2.0, 0.0, 0.5, 1.0]), min_size=K, max_size=K))
def test_invalid_values_pass_through_and_are_not_learned_from(values):
    calibration = trained(overconfident, steps=40)
    row = np.array([values])
    mapped = calibration.apply(row)
    bad = ~((row >= 0) & (row <= 1))
    assert np.array_equal(mapped[bad], row[bad], equal_nan=True)
    assert ((mapped[~bad] >= 0) & (mapped[~bad] <= 1)).all()
    for _ in range(32):
        calibration.observe(np.tile(row, (8, 1)), np.full(8, K), np.full(8, K))
    assert np.isfinite(calibration.coefficients).all()


def test_the_device_applies_the_same_map():
    calibration = trained(overconfident)
    confidence = np.random.default_rng(5).random((6, K))
    confidence[0, 1], confidence[1, 0], confidence[2, 2] = np.nan, 0.0, 1.0
    coefficients = torch.tensor(calibration.coefficients, dtype=torch.float32)
    keys = _keys(torch.tensor(confidence, dtype=torch.float32), K, 1, None, coefficients).numpy().T
    from sglang_adaptive.policy.survival import survival

    assert keys == pytest.approx(survival(calibration.apply(confidence)), abs=1e-5)


def test_it_survives_a_restart():
    calibration = trained(overconfident)
    record = json.loads(json.dumps(calibration.to_dict()))
    again = Calibration(K)
    again.load_dict(record)
    assert again.coefficients.tolist() == calibration.coefficients.tolist() and not again.is_identity


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r.pop("mean"),
        lambda r: r.update(mean=[[0.0, 1.0]]),
        lambda r: r.update(mean=[[float("nan"), 1.0]] * K),
        lambda r: r.update(mean=[["x", 1.0]] * K),
        lambda r: r.update(mean=[[1e9, 1.0]] * K),
        lambda r: r.update(samples=[-1] * K),
        lambda r: r.update(information=[[0.0]] * K),
        lambda r: r.update(precision=[[[-1.0, 0.0], [0.0, 1.0]]] * K),
        lambda r: r.update(precision=[[[1.0, 5.0], [0.0, 1.0]]] * K),
    ],
)
def test_a_broken_record_is_refused_and_changes_nothing(spoil):
    calibration = trained(overconfident)
    before, record = calibration.coefficients.tolist(), trained(overconfident, seed=1).to_dict()
    spoil(record)
    with pytest.raises(ValueError, match="learned again"):
        calibration.load_dict(record)
    assert calibration.coefficients.tolist() == before


def test_newton_finds_the_maximum_likelihood():
    """With all samples in one batch and a weak prior, the gradient of the log-likelihood is all but zero."""
    random = np.random.default_rng(8)
    x = np.stack([np.ones(1500), random.normal(0, 2, 1500)], axis=1)
    y = random.random(1500) < sigmoid(x @ [0.5, -1.5])
    model = LogisticFilter(1, np.zeros(2), np.full(2, 1e-9), update_steps=1)
    model.observe(x[:, None, :], np.ones(1500, np.int64), y.astype(np.int64))
    gradient = x.T @ (sigmoid(x @ model.weights[0]) - y)
    assert np.abs(gradient).max() < 1e-3
    assert model.weights[0] == pytest.approx([0.5, -1.5], abs=0.25)


def test_separable_outcomes_do_not_blow_up():
    model = LogisticFilter(1, np.array([0.0, 1.0]), np.array([4.0, 8.0]), update_steps=1)
    x = np.stack([np.ones(200), np.where(np.arange(200) < 100, -12.0, 12.0)], axis=1)
    for _ in range(50):
        model.observe(x[:, None, :], np.ones(200, np.int64), (np.arange(200) >= 100).astype(np.int64))
    assert np.isfinite(model.weights).all() and np.abs(model.weights).max() < 20


def test_the_first_updates_come_early_and_then_every_sixteen_steps():
    model, changes = LogisticFilter(2, np.zeros(1), np.ones(1)), []
    for step in range(1, 65):
        before = model.samples.sum()
        model.observe(np.ones((64, 2, 1)), np.full(64, 2), np.full(64, 2))
        changes += [step] if model.samples.sum() > before else []
    assert changes[:3] == [1, 3, 4] and all(later - sooner <= 16 for sooner, later in pairwise(changes))
    assert len(changes) <= 2 * 4 + 2 * 64 // 16


def test_a_full_buffer_takes_a_spread_of_the_requests():
    model = LogisticFilter(1, np.zeros(1), np.ones(1), buffer_rows=10, update_steps=100)
    model._interval = 100  # as after the first, frequent updates
    accepted = np.arange(40) % 2
    model.observe(np.ones((40, 1, 1)), np.ones(40, np.int64), np.repeat([0, 1], 20))
    assert not model.has_room and model._y.mean() == 0.5
    model.observe(np.ones((40, 1, 1)), np.ones(40, np.int64), accepted)
    for _ in range(98):
        model.observe_nothing()
    assert model.has_room and model.samples.tolist() == [10]
