import numpy as np
import pytest
import torch

from sglang_adaptive.policy.estimator import Estimator, estimate_on_device, features
from sglang_adaptive.policy.history import AcceptanceHistory
from sglang_adaptive.policy.logistic import logit, sigmoid

K = 3


def auc(score, happened):
    order = np.argsort(score, kind="stable")
    ranks = np.empty(score.size)
    ranks[order] = np.arange(1, score.size + 1)
    positives = happened.sum()
    return (ranks[happened].sum() - positives * (positives + 1) / 2) / (positives * (happened.size - positives))


def world(random, requests):
    """Drafts whose acceptance depends on the maximum, the entropy and how hard the request is."""
    probability = random.beta(3, 1.2, (requests, K))
    entropy = 2.0 * (1 - probability) + random.random((requests, K))
    recent = random.normal(0, 1, requests)
    truth = sigmoid(0.3 + 0.7 * logit(probability) - 0.8 * entropy + 0.9 * recent[:, None])
    return probability, entropy, recent, truth


def trained(steps=1500, seed=0):
    estimator, random = Estimator(K), np.random.default_rng(seed)
    for _ in range(steps):
        probability, entropy, recent, truth = world(random, 16)
        verified = random.integers(0, K + 1, 16)
        alive = np.logical_and.accumulate(random.random(truth.shape) < truth, axis=1).sum(axis=1)
        estimator.observe(features(probability, entropy, recent), verified, np.minimum(alive, verified))
    return estimator


def test_at_first_it_believes_the_drafters_maximum():
    probability = np.array([[0.2, 0.5, 0.9]])
    got = Estimator(K).confidence(features(probability, np.ones((1, K)), np.array([3.0])))
    assert got == pytest.approx(probability)


def test_it_learns_what_the_features_say():
    estimator, random = trained(), np.random.default_rng(5)
    probability, entropy, recent, truth = world(random, 20_000)
    happened = random.random(truth.shape) < truth
    got = estimator.confidence(features(probability, entropy, recent))
    for j in range(K):
        best, learned, maximum = (auc(s[:, j], happened[:, j]) for s in (truth, got, probability))
        assert learned > best - 0.01 and learned > maximum + 0.02
        assert np.mean((got[:, j] - happened[:, j]) ** 2) < np.mean((truth[:, j] - happened[:, j]) ** 2) + 0.003


def test_the_device_computes_the_same():
    estimator = trained(100)
    probability, entropy, recent, _ = world(np.random.default_rng(2), 50)
    probability[0] = [np.nan, 0.0, 1.0]
    probability[1, 1] = 1.5
    entropy[2, 0] = 99.0
    given = probability, entropy, recent, estimator.coefficients, np.resize([0.0, 0.6, 1.0, 1.7], 50)
    tensors = [torch.tensor(a, dtype=torch.float32) for a in given]
    for temperature in (None, given[4]):
        wanted = estimator.confidence(features(probability, entropy, recent, temperature))
        got = estimate_on_device(*tensors[:4], None if temperature is None else tensors[4]).numpy()
        assert got == pytest.approx(wanted, abs=5e-5, nan_ok=True)
    assert np.isnan(wanted[0, 0]) and np.isnan(wanted[1, 1]) and np.isfinite(wanted[2:]).all()


def test_sampled_requests_are_learned_apart_from_greedy_ones():
    estimator, random = Estimator(K), np.random.default_rng(3)
    temperature, none = np.arange(32) % 2 * 1.0, np.zeros(32)

    def draw():
        probability = random.beta(2, 1.5, (32, K))
        return probability, np.where(temperature[:, None] > 0, 0.6, sigmoid(2.0 * logit(probability)))

    for _ in range(1500):
        probability, truth = draw()
        accepted = np.logical_and.accumulate(random.random(truth.shape) < truth, axis=1).sum(axis=1)
        seen = features(probability, np.ones((32, K)), none, temperature)
        estimator.observe(seen, np.full(32, K), accepted)
    probability, truth = draw()
    got = estimator.confidence(features(probability, np.ones((32, K)), none, temperature))
    assert np.abs(got - truth).mean() < 0.04


def test_a_position_knows_the_one_before():
    estimator, random = Estimator(2), np.random.default_rng(4)
    none = np.zeros(64)
    for _ in range(600):
        probability = random.beta(2, 1.5, (64, 2))
        truth = np.stack([np.ones(64), probability[:, 0]], axis=1)
        accepted = np.logical_and.accumulate(random.random(truth.shape) < truth, axis=1).sum(axis=1)
        estimator.observe(features(probability, np.ones((64, 2)), none), np.full(64, 2), accepted)
    got = estimator.confidence(features(np.array([[0.2, 0.5], [0.8, 0.5]]), np.ones((2, 2)), none[:2]))
    assert got[:, 1] == pytest.approx([0.2, 0.8], abs=0.08)


def test_it_survives_a_restart():
    estimator, again = trained(100), Estimator(K)
    again.load_dict(estimator.to_dict())
    assert again.coefficients.tolist() == estimator.coefficients.tolist()
    with pytest.raises(ValueError, match="draft length"):
        Estimator(K + 1).load_dict(estimator.to_dict())


def test_history_tells_easy_from_hard_requests():
    history = AcceptanceHistory(8)
    slots, generations = np.array([5, 2]), np.array([1, 1])
    assert history.relative(slots, generations).tolist() == [0.0, 0.0]
    for _ in range(20):
        history.observe(slots, generations, np.array([3, 3]), np.array([3, 0]))
    easy, hard = history.relative(slots, generations)
    assert easy > 1 and hard < -1
    # Rows swap, slots keep their history.
    assert history.relative(slots[::-1], generations).tolist() == [hard, easy]


def test_a_new_owner_of_a_slot_starts_without_history():
    history = AcceptanceHistory(4)
    slot = np.array([1])
    for _ in range(20):
        history.observe(slot, np.array([7]), np.array([3]), np.array([0]))
    history.observe(np.array([2]), np.array([7]), np.array([3]), np.array([3]))
    assert history.relative(slot, np.array([8]))[0] == 0.0
    history.observe(slot, np.array([8]), np.array([3]), np.array([3]))
    assert history.relative(slot, np.array([8]))[0] > 0


def test_trimmed_drafts_are_no_rejections():
    history = AcceptanceHistory(2)
    for _ in range(50):
        history.observe(np.array([0, 1]), np.array([0, 0]), np.array([1, 3]), np.array([1, 3]))
    relative = history.relative(np.array([0, 1]), np.array([0, 0]))
    assert (relative >= 0).all(), "one verified and accepted is as good as three of three"


def test_a_position_that_is_always_trimmed_leans_on_the_one_before():
    estimator, random = Estimator(K), np.random.default_rng(6)
    none = np.zeros(64)
    for _ in range(300):
        probability = random.beta(2, 1.5, (64, K))
        truth = sigmoid(0.5 * logit(probability) - 1.0)
        accepted = np.logical_and.accumulate(random.random(truth.shape) < truth, axis=1).sum(axis=1)
        verified = np.full(64, 1)
        estimator.observe(features(probability, np.ones((64, K)), none), verified, np.minimum(accepted, verified))
    probability = random.beta(2, 1.5, (64, K))
    got = estimator.confidence(features(probability, np.ones((64, K)), none))
    assert np.abs(got - sigmoid(0.5 * logit(probability) - 1.0)).max() < 0.05
    # What it sees of a position itself counts for more in the end.
    for _ in range(600):
        probability = random.beta(2, 1.5, (64, K))
        accepted = np.where(random.random(64) < 0.9, 3, 1)
        estimator.observe(features(probability, np.ones((64, K)), none), np.full(64, K), accepted)
    assert estimator.confidence(features(probability, np.ones((64, K)), none))[:, 1].mean() == pytest.approx(
        0.9, abs=0.03
    )


# -- beside a confidence head --


def test_at_first_it_believes_the_head():
    head = np.array([[0.3, 0.6, 0.8]])
    got = Estimator(K, head=True).confidence(features(np.full((1, K), 0.9), np.ones((1, K)), np.zeros(1), head=head))
    assert got == pytest.approx(head)


def headed_world(random, requests):
    """The head and the distribution each know a part of what decides."""
    probability, entropy, recent, _ = world(random, requests)
    head = random.beta(2, 2, (requests, K))
    return probability, entropy, recent, head, sigmoid(0.8 * logit(head) + 0.8 * logit(probability) - 0.5)


def test_it_learns_what_the_head_does_not_know():
    estimator, random = Estimator(K, head=True), np.random.default_rng(4)
    for _ in range(600):
        *seen, head, truth = headed_world(random, 16)
        alive = np.logical_and.accumulate(random.random(truth.shape) < truth, axis=1).sum(axis=1)
        estimator.observe(features(*seen, head=head), np.full(16, K), alive)
    *seen, head, truth = headed_world(random, 20_000)
    happened = random.random(truth.shape) < truth
    got = estimator.confidence(features(*seen, head=head))
    for j in range(K):
        best, learned, alone = (auc(s[:, j], happened[:, j]) for s in (truth, got, head))
        assert learned > best - 0.01 and learned > alone + 0.05
    # On the device, with what is no probability contained to its draft.
    head[0, 1], head[1, 0], seen[0][2, 2] = np.nan, 1.5, -0.1
    temperature = np.resize([0.0, 0.8], len(head))
    wanted = estimator.confidence(features(*seen, temperature, head))
    tensors = [torch.tensor(a, dtype=torch.float32) for a in (*seen, estimator.coefficients, temperature, head)]
    assert estimate_on_device(*tensors).numpy() == pytest.approx(wanted, abs=5e-5, nan_ok=True)
    assert np.isnan(wanted).sum() == 3
