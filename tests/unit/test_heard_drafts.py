"""A confidence head and the draft's distributions together: what is made of them, and when they are asked."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from sglang_adaptive.policy.budget import Decision
from sglang_adaptive.policy.estimator import Estimator, features
from sglang_adaptive.runtime.estimate import Estimate
from sglang_adaptive.runtime.heard_drafts import HeardDrafts, hear
from sglang_adaptive.runtime.relay import StepRecord
from sglang_adaptive.runtime.trace_features import DraftFeatures, draft_columns, width

R, K, V = 3, 2, 11


class Block(msgspec.Struct, frozen=True):
    corrected_logits: torch.Tensor
    temperatures: torch.Tensor
    greedy_mask: torch.Tensor


class Proposal(msgspec.Struct, frozen=True):
    draft_block: Block
    confidence: torch.Tensor | None


@pytest.fixture
def block():
    logits = 4 * torch.randn((R, K, V), generator=torch.Generator().manual_seed(0))
    logits[0, 0, 3:] = -torch.inf
    logits[1, 1] = 0.0
    return Block(logits, torch.tensor([1.0, 0.5, 2.0]), torch.tensor([True, False, False]))


def estimate(**more) -> Estimate:
    return Estimate(gamma=K, num_slots=8, device="cpu", head=True, **more)


def columns_of(block: Block, head: torch.Tensor, live=None):
    live = live or estimate().live(len(head))
    return hear(block.corrected_logits, block.temperatures, block.greedy_mask, head, *live)


def test_the_features_are_those_of_the_distribution_that_drafts_are_drawn_from(block):
    head = torch.full((R, K), 0.25)
    confidence, columns = columns_of(block, head)
    assert columns.shape == (R, 4 * K + 1) == (R, estimate().columns)
    wanted = draft_columns(block.corrected_logits, block.temperatures, block.greedy_mask).numpy()
    got, wanted = (DraftFeatures.of(each, K) for each in (columns.numpy(), wanted))
    for name in ("max_probability", "entropy", "temperature"):
        np.testing.assert_allclose(getattr(got, name), getattr(wanted, name), rtol=1e-5, atol=1e-6)
    assert np.isnan(got.margin).all() and (columns[:, width(K) :] == head).all()
    torch.testing.assert_close(confidence, head)  # believed until something was learned


def test_halves_are_described_as_well(block):
    half = Block(block.corrected_logits.bfloat16(), block.temperatures, block.greedy_mask)
    found = [columns_of(each, torch.full((R, K), 0.5))[1].nan_to_num() for each in (block, half)]
    torch.testing.assert_close(*found, atol=0.05, rtol=0.05)


def test_it_learns_from_finished_steps_what_the_policy_would():
    random, ours, plain = np.random.default_rng(1), estimate(), Estimator(K, head=True)
    slots, generations, ones = np.arange(R), np.ones(R, np.int64), np.ones(R, np.int64)
    for iteration in range(64):
        ours.begin(iteration, slots, generations)
        recent = ours.live(R)[0].numpy()
        columns = random.random((R, 4 * K + 1)).astype(np.float32)
        accepted = random.integers(0, K + 1, R)
        lens = {"verify_lens": ones * (K + 1), "commit_lens": accepted + 1, "step_ms": None}
        ours.learn(
            StepRecord(
                iteration, slots, generations, 1.0, confidence=columns[:, -K:], extra=columns, decision=None, **lens
            )
        )
        seen = DraftFeatures.of(columns, K)
        known = features(seen.max_probability, seen.entropy, recent, seen.temperature, columns[:, -K:])
        plain.observe(known, ones * K, accepted)
    np.testing.assert_allclose(ours.live(R)[1].numpy(), plain.coefficients, rtol=1e-4, atol=1e-4)
    assert plain.version > 0


def test_only_steps_that_want_it_are_heard(block):
    head, seen, wanted = torch.full((R, K), 0.5), [], [True]
    proposer = SimpleNamespace(propose=lambda **kwargs: Proposal(block, kwargs["confidence"]))
    HeardDrafts(proposer, estimate(), lambda: wanted[0], seen.append)
    assert proposer.propose(confidence=head).confidence is not head and len(seen) == 1
    assert proposer.propose(confidence=None).confidence is None and len(seen) == 1
    wanted[0] = False
    assert proposer.propose(confidence=head).confidence is head and len(seen) == 1


def test_the_recent_acceptance_of_another_batch_is_not_taken():
    ours = estimate()
    assert ours.live(2)[0].tolist() == [0.0, 0.0]
    ours.begin(1, np.arange(R), np.ones(R, np.int64))
    assert len(ours.live(R)[0]) == R and len(ours.live(5)[0]) == 5


def test_a_decision_that_is_repeated_is_heard_if_it_trims():
    from sglang_adaptive.runtime.planner import StepPlanner

    planner = SimpleNamespace(_engine=None, decision=None, _repeating=False)
    hears = StepPlanner.hears_draft
    assert hears(planner)  # while it is profiled
    planner._engine = object()
    assert not hears(planner)
    planner.decision = Decision(0, True, True, 1.0, 1.0, "test")
    assert hears(planner)
    planner._repeating = True
    assert not hears(planner)
    # A trim hands out shares all the same.
    planner.decision = Decision(2, True, False, 1.0, 1.0, "test")
    assert hears(planner)
    planner.decision = Decision(0, False, False, 1.0, 1.0, "test")
    assert not hears(planner)
