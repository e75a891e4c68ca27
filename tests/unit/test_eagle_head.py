"""The parts of adaptive EAGLE steps that need no server: what is seen of a draft, what is cut off a chain."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")
from sglang_adaptive.platform_cpu.chains import sample_chain_target_only, verify_chain_greedy
from sglang_adaptive.platform_cpu.kernels import chain_speculative_sampling
from sglang_adaptive.policy.estimator import Estimator, features
from sglang_adaptive.runtime import eagle_verify
from sglang_adaptive.runtime.eagle_draft import distribution, tell
from sglang_adaptive.runtime.estimate import SEND_STEPS, Estimate
from sglang_adaptive.runtime.layouts import Layouts
from sglang_adaptive.runtime.relay import StepRecord
from sglang_adaptive.runtime.trace_features import DraftFeatures

ROWS, SLOTS, VOCAB = 4, 5, 11


def chain(draft_probs=None):
    index = torch.arange(ROWS * SLOTS).view(ROWS, SLOTS)
    following = torch.arange(1, SLOTS + 1).repeat(ROWS, 1)
    following[:, -1] = -1
    return SimpleNamespace(
        draft_token_num=SLOTS, retrieve_index=index, retrieve_next_token=following, draft_probs=draft_probs
    )


def outputs():
    return {
        "predicts": torch.zeros(ROWS * SLOTS, dtype=torch.int32),
        "accept_index": torch.full((ROWS, SLOTS), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(ROWS, dtype=torch.int32),
    }


def test_a_cut_chain_accepts_nothing_beyond_what_was_verified():
    candidates = torch.randint(0, VOCAB, (ROWS, SLOTS))
    # The target agrees with every draft: only the cut stops the acceptance.
    predicted = torch.cat([candidates[:, 1:], torch.full((ROWS, 1), 7)], dim=1)
    lens = torch.tensor([1, 2, 3, 5], dtype=torch.int32)
    tree, out = chain(), outputs()
    eagle_verify.cut(tree, lens)
    verify_chain_greedy(
        **out,
        candidates=candidates,
        retrieve_index=tree.retrieve_index,
        retrieve_next_token=tree.retrieve_next_token,
        target_predict=predicted,
        topk=1,
    )
    assert out["accept_token_num"].tolist() == (lens - 1).tolist()
    last = out["predicts"].view(ROWS, SLOTS)[torch.arange(ROWS), lens.long() - 1]
    assert last.tolist() == predicted[torch.arange(ROWS), lens.long() - 1].tolist()


def draws(sample, rounds=4000):
    counts = torch.zeros(ROWS, SLOTS, VOCAB)
    for _ in range(rounds):
        out = outputs()
        coins = {
            "uniform_samples": torch.rand(ROWS, SLOTS),
            "uniform_samples_for_final_sampling": torch.rand(ROWS),
        }
        sample(out, coins)
        count = out["accept_token_num"].long()
        last = out["predicts"].view(ROWS, SLOTS)[torch.arange(ROWS), count].long()
        counts[torch.arange(ROWS), count, last] += 1
    return counts


@pytest.mark.parametrize("sampled_drafts", [False, True])
def test_what_is_sampled_at_the_cut_has_the_targets_distribution(sampled_drafts):
    """Also with sampled drafts, whose distributions beyond the cut are zeroed: nothing may be subtracted there."""
    torch.manual_seed(5)
    target = torch.softmax(torch.randn(ROWS, SLOTS, VOCAB), dim=-1)
    drafted = torch.softmax(torch.randn(ROWS, SLOTS - 1, VOCAB), dim=-1)
    candidates = torch.randint(0, VOCAB, (ROWS, SLOTS))
    lens = torch.tensor([1, 1, 2, 4], dtype=torch.int32)
    tree = chain(drafted.clone() if sampled_drafts else None)
    eagle_verify.cut(tree, lens)

    def sample(out, coins):
        if sampled_drafts:
            chain_speculative_sampling(
                **out, **coins, candidates=candidates, retrive_index=tree.retrieve_index, target_probs=target,
                draft_probs=tree.draft_probs,
            )  # fmt: skip
        else:
            sample_chain_target_only(
                **out, **coins, candidates=candidates, retrive_index=tree.retrieve_index, target_probs=target,
                retrive_next_token=tree.retrieve_next_token,
            )  # fmt: skip

    counts = draws(sample)
    assert not counts.sum(dim=2)[torch.arange(SLOTS) >= lens.unsqueeze(1)].any(), "a draft beyond the cut was accepted"
    at_cut = counts[torch.arange(ROWS), lens.long() - 1]
    expected = target[torch.arange(ROWS), lens.long() - 1]
    for row in (0, 1):  # nothing verified but the anchor: every draw happens at the cut
        seen = at_cut[row] / at_cut[row].sum()
        assert (seen - expected[row]).abs().max() < 5 * (0.25 / at_cut[row].sum()) ** 0.5


def test_the_draft_distribution_in_two_numbers():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [50.0, 0.0, 0.0, -float("inf")]])
    largest, entropy = distribution(logits).unbind(1)
    assert largest.tolist() == pytest.approx([0.25, 1.0])
    assert entropy.tolist() == pytest.approx([np.log(4), 0.0], abs=1e-6)
    assert torch.isnan(distribution(torch.full((1, 3), float("nan")))).all()


def record(iteration, maxima, entropies, verified, accepted):
    rows, gamma = maxima.shape
    extra = np.concatenate([maxima, entropies, np.full((rows, gamma), np.nan), np.ones((rows, 1))], axis=1)
    return StepRecord(
        iteration=iteration,
        slots=np.arange(rows),
        generations=np.zeros(rows, np.int64),
        kv_tokens=1.0,
        confidence=maxima,
        verify_lens=verified + 1,
        commit_lens=accepted + 1,
        step_ms=None,
        extra=extra.astype(np.float32),
    )


def told(estimate, maxima, entropies, temperature, slots=None):
    """Of requests in ``slots``, whose first drafts the draft-extends before kept by slot."""
    rows = len(maxima)
    slots = torch.arange(rows) if slots is None else slots
    drafted = torch.stack([torch.as_tensor(maxima), torch.as_tensor(entropies)], dim=2)
    first, asked = torch.zeros(len(estimate.by_slot), 2), torch.full((len(estimate.by_slot),), float("nan"))
    first[slots], asked[slots] = drafted[:, 0], temperature
    return tell(first, drafted[:, 1:], asked, estimate.by_slot, estimate.coefficients, slots)


def test_the_estimate_believes_the_draft_at_first_and_then_what_happened():
    generator = np.random.default_rng(2)
    rows, gamma = 32, 3
    estimate = Estimate(gamma=gamma, num_slots=rows, device="cpu")
    maxima = np.full((rows, gamma), 0.9, np.float32)
    entropies = np.full((rows, gamma), 0.5, np.float32)

    def confidence():
        return told(estimate, maxima, entropies, torch.ones(rows))[0]

    slots, generations = np.arange(rows), np.zeros(rows, np.int64)
    estimate.begin(0, slots, generations)
    assert confidence().numpy() == pytest.approx(np.full((rows, gamma), 0.9), abs=1e-5)
    estimate.learn(record(0, maxima, entropies, np.full(rows, gamma), np.full(rows, 0)))
    for step in range(1, 20 * SEND_STEPS):
        estimate.begin(step, slots, generations)
        # Half of the drafts fail, whatever the draft model believes.
        accepted = np.minimum(generator.geometric(0.5, rows) - 1, gamma)
        estimate.learn(record(step, maxima, entropies, np.full(rows, gamma), accepted))
    estimate.begin(step + 1, slots, generations)
    assert confidence().mean().item() == pytest.approx(0.5, abs=0.05)


def test_the_device_estimates_what_the_policy_does():
    """By slot: the requests of a batch stand in any order, and others were served in between."""
    generator = np.random.default_rng(3)
    estimate, gamma = Estimate(gamma=3, num_slots=12, device="cpu"), 3
    slots, generations = torch.tensor([7, 2, 9, 4]), np.array([1, 1, 2, 5])
    for step in range(40):
        estimate.begin(step, slots.numpy(), generations)
        maxima, entropies = generator.random((4, gamma), np.float32), generator.random((4, gamma), np.float32)
        accepted = np.minimum(generator.geometric(0.4 + 0.1 * np.arange(4)) - 1, gamma)
        seen = record(step, maxima, entropies, np.full(4, gamma), accepted)
        estimate.learn(replace(seen, slots=slots.numpy(), generations=generations))
    estimate.begin(40, slots.numpy(), generations)
    rows = torch.tensor([2, 0, 3])
    recent = estimate._history.relative(slots[rows].numpy(), generations[rows])
    assert np.unique(recent).size == 3 and np.abs(recent).min() > 0.01
    temperature, maxima[2, 2] = torch.tensor([0.0, 1.0, 0.6]), float("nan")
    confidence, columns = told(estimate, maxima[rows], entropies[rows], temperature, slots[rows])
    plain = Estimator(gamma)
    plain._filter._mean[:] = estimate.coefficients.numpy().T
    plain._filter.samples[:] = plain._filter.min_samples
    wanted = plain.confidence(features(maxima[rows], entropies[rows], recent, temperature.numpy()))
    assert np.isnan(wanted[0, 2]) and np.isfinite(wanted).sum() == 8
    np.testing.assert_allclose(confidence.numpy(), wanted, atol=1e-5)
    assert columns.shape == (3, estimate.columns)
    heard = DraftFeatures.of(columns.numpy(), gamma)
    np.testing.assert_array_equal(heard.max_probability, maxima[rows])
    np.testing.assert_array_equal(heard.entropy, entropies[rows])
    assert heard.temperature.tolist() == temperature.tolist() and np.isnan(heard.margin).all()


def test_learning_step_by_step_is_learning_together():
    """What the estimate gathers before it makes features of it is what the estimator would have gathered."""
    generator = np.random.default_rng(4)
    estimate, plain, rows = Estimate(gamma=3, num_slots=4, device="cpu"), Estimator(3), 3
    slots, generations = np.arange(rows), np.zeros(rows, np.int64)
    for step in range(200):
        estimate.begin(step, slots, generations)
        recent = estimate._recent[step]
        maxima, entropies = generator.random((rows, 3), np.float32), generator.random((rows, 3), np.float32)
        accepted = np.minimum(generator.geometric(0.4, rows) - 1, 3)
        estimate.learn(record(step, maxima, entropies, np.full(rows, 3), accepted))
        seen = features(maxima, entropies, recent, np.ones(rows))
        plain.observe(seen, np.full(rows, 3), accepted)
    assert estimate._estimator.version == plain.version > 0
    np.testing.assert_array_equal(estimate._estimator.coefficients, plain.coefficients)


def test_a_step_without_a_draft_teaches_nothing_and_is_forgotten():
    estimate = Estimate(gamma=3, num_slots=4, device="cpu")
    estimate.begin(7, np.arange(4), np.zeros(4, np.int64))
    ones = np.ones(4, np.int64)
    estimate.learn(StepRecord(7, np.arange(4), np.zeros(4, np.int64), 1.0, None, ones, ones, None))
    assert not estimate._recent


def runner(tiers=None, slots=4):
    graphs = None
    if tiers is not None:
        graphs = SimpleNamespace(ragged_verify_mode=True, capture_num_tokens=tiers, max_bs=slots)
    return SimpleNamespace(decode_cuda_graph_runner=graphs)


def test_layouts_without_graphs_hold_exactly_the_tokens():
    layouts = Layouts(runner(), "cpu", SLOTS)
    ragged = layouts.ragged(torch.tensor([1, 3, 2], dtype=torch.int32), 6)
    assert ragged.verify_lens_cpu == [1, 3, 2] and ragged.graph_num_tokens == 6
    assert layouts.uniform(3).graph_num_tokens == 3 * SLOTS
    assert layouts.anchors(3).verify_lens_cpu == [1, 1, 1]
    assert layouts.anchors(3) is layouts.anchors(3) and layouts.uniform(2) is layouts.uniform(2)


def test_layouts_with_graphs_are_padded_to_a_tier_and_read_nothing_back():
    layouts = Layouts(runner(tiers=[2, 4, 8, 16]), "cpu", SLOTS)
    ragged = layouts.ragged(torch.tensor([1, 3, 2], dtype=torch.int32), 6)
    assert ragged.graph_num_tokens == 8 and ragged.verify_lens_cpu is None
    assert layouts.ragged(torch.full((4,), 5, dtype=torch.int32), 20) is None, "no graph is that large"
    assert layouts.ragged(torch.ones(5, dtype=torch.int32), 5) is None, "no graph has so many rows"
    assert layouts.anchors(3).graph_num_tokens == 4


def test_packed_results_come_back_strided():
    lens = torch.tensor([1, 3, 2], dtype=torch.int32)
    layout = Layouts(runner(), "cpu", SLOTS).ragged(lens, 6)
    packed = torch.arange(6.0).unsqueeze(1)
    strided = eagle_verify._PackedTarget(None, layout, SLOTS)._strided(packed).view(3, SLOTS)
    assert strided[0, 0] == 0 and strided[1, :3].tolist() == [1, 2, 3] and strided[2, :2].tolist() == [4, 5]
    assert not strided[torch.arange(SLOTS) >= lens.unsqueeze(1)].any()
    anchors = Layouts(runner(), "cpu", SLOTS).anchors(6)
    assert eagle_verify._PackedTarget(None, anchors, 1)._strided(packed).data_ptr() == packed.data_ptr()
