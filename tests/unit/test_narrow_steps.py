"""Shorter drafts stand in for the host's for a step, in full or in the columns of K, and never when they are stale."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from sglang_adaptive.policy.budget import ALL_WORTH, Decision
from sglang_adaptive.runtime import narrow_drafts
from sglang_adaptive.runtime.counters import Counters
from sglang_adaptive.runtime.narrow_drafts import NarrowDrafts, widths
from sglang_adaptive.runtime.relay import SYNC_LAG, StepRelay

GAMMA, WIDTH, VOCAB = 7, 3, 11


class Block(msgspec.Struct):
    draft_tokens: torch.Tensor
    corrected_logits: torch.Tensor | None
    greedy_draft: bool = False


class Proposal(msgspec.Struct):
    draft_block: Block
    confidence: torch.Tensor | None
    confidence_raw: torch.Tensor | None
    verify_ids: torch.Tensor | None = None


class Proposer:
    """Drafts ``gamma`` tokens a request, outside any graph."""

    _mask_token_id, sample_from_anchor, _tp_sync, _greedy_draft, _noise = 0, True, None, False, "one noise"
    _draft_sampler = draft_model = None

    def __init__(self, *, gamma, **_):
        self.gamma, self.asked = gamma, []

    def propose(self, **kwargs):
        self.asked.append(kwargs)
        tokens = torch.arange(2 * self.gamma).view(2, self.gamma) + 1
        confidence = torch.full((2, GAMMA), 0.5)[:, : self.gamma]
        return Proposal(Block(tokens, torch.ones((2, self.gamma, VOCAB))), confidence, confidence.clone(), tokens)


class Observers:
    def __init__(self):
        self.told = []

    def note_idle_decode_step(self):
        self.told.append("idle")

    def begin_step(self):
        self.told.append("begin")

    def observe_verify_step(self, **kwargs):
        self.told.append("observe")

    def dump_info_records(self):
        return "records"


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(narrow_drafts, "DraftBlockProposer", Proposer)
    monkeypatch.setattr(narrow_drafts, "make_draft_block_spec_info", lambda **kwargs: kwargs)
    return SimpleNamespace(
        gamma=GAMMA,
        verify_num_draft_tokens=GAMMA + 1,
        device="cpu",
        draft_model_runner=SimpleNamespace(decode_cuda_graph_runner=None, attn_backend="attention"),
        target_worker=SimpleNamespace(random_seed=1),
        _proposer=Proposer(gamma=GAMMA),
        _block_pos_offsets=torch.arange(GAMMA + 1),
        _observers=Observers(),
        _verify_executor=SimpleNamespace(gamma=GAMMA, verify_num_draft_tokens=GAMMA + 1),
    )


def test_half_of_a_block_is_the_shorter_one_where_it_has_a_half():
    assert [widths(gamma) for gamma in (1, 3, 4, 5, 7, 16)] == [(), (), (2,), (2,), (3,), (8,)]


def test_a_trimmed_draft_comes_in_the_columns_of_k(worker):
    asked = [WIDTH]
    narrow = NarrowDrafts(worker, (WIDTH,), lambda: asked[0])
    assert narrow.widths == (WIDTH,) and narrow.drafts(WIDTH) and not narrow.drafts(GAMMA)
    proposal = worker._proposer.propose(anchor_prepared=True)
    block = proposal.draft_block
    assert block.draft_tokens[:, :WIDTH].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert block.draft_tokens.shape == (2, GAMMA) and block.corrected_logits.shape == (2, GAMMA, VOCAB)
    assert proposal.confidence.shape == (2, GAMMA) and (proposal.confidence[:, :WIDTH] == 0.5).all()
    assert proposal.verify_ids is None, "of three columns: the worker has to put its own together"
    assert narrow._narrow[WIDTH][0].asked == [{"anchor_prepared": False}]
    assert narrow._narrow[WIDTH][0]._noise == "one noise"
    asked[0] = GAMMA
    assert worker._proposer.propose(anchor_prepared=True).draft_block.draft_tokens.shape == (2, GAMMA)


def test_graphs_that_the_host_captured_anew_make_ours_stale(worker):
    narrow = NarrowDrafts(worker, (WIDTH,), lambda: WIDTH)
    worker.draft_model_runner.decode_cuda_graph_runner = object()
    assert not narrow.drafts(WIDTH)
    assert worker._proposer.propose().draft_block.draft_tokens.shape == (2, GAMMA)
    assert not narrow._narrow[WIDTH][0].asked


def test_a_whole_step_is_that_of_a_server_with_a_shorter_block(worker):
    narrow, observers = NarrowDrafts(worker, (WIDTH,), lambda: WIDTH), worker._observers
    before = dict(vars(worker)), dict(vars(worker._verify_executor))
    with pytest.raises(ZeroDivisionError), narrow.whole(WIDTH):
        executor = worker._verify_executor
        assert (worker.gamma, worker.verify_num_draft_tokens) == (WIDTH, WIDTH + 1)
        assert (executor.gamma, executor.verify_num_draft_tokens) == (WIDTH, WIDTH + 1)
        assert worker._block_pos_offsets.tolist() == list(range(WIDTH + 1))
        proposal = worker._proposer.propose()
        assert proposal.draft_block.draft_tokens.tolist() == [[1, 2, 3], [4, 5, 6]]
        assert proposal.confidence.shape == (2, WIDTH) and proposal.confidence.is_contiguous()
        worker._observers.begin_step()
        worker._observers.observe_verify_step(bs=2)
        assert observers.told == ["idle"], "what the host keeps of a step has K columns"
        assert worker._observers.dump_info_records() == "records"
        raise ZeroDivisionError
    assert (dict(vars(worker)), dict(vars(worker._verify_executor))) == before
    assert worker._proposer.propose().draft_block.draft_tokens.shape == (2, GAMMA)


def test_the_relay_and_the_counters_know_the_width_of_a_whole_step():
    relay = StepRelay(num_slots=8, gamma=GAMMA, max_requests=4, device="cpu", lag=SYNC_LAG)
    decision = Decision(6, True, True, 5.0, 2.0, ALL_WORTH, 0.0, WIDTH)
    commit = torch.tensor([4, 1])
    for iteration, columns in ((1, GAMMA), (2, WIDTH)):
        wide = decision.of_width(0, True)
        relay.publish(
            iteration=iteration,
            slots=np.array([2, 5]),
            generations=np.array([1, 1]),
            kv_tokens=9.0,
            confidence=torch.full((2, columns), iteration / 4),
            verify_lens=None,
            commit_lens=commit,
            decision=wide if columns == GAMMA else decision,
        )
    relay.count(iteration=3, requests=2, commit_lens=commit, decision=decision, tier=8, last=True)
    wide, narrow, counted = relay.collect(4)
    assert [record.verify_lens.tolist() for record in (wide, narrow, counted)] == [[8, 8], [4, 4], [4, 4]]
    assert narrow.confidence.shape == (2, GAMMA) and (narrow.confidence[:, :WIDTH] == 0.5).all()
    confidence, fresh = relay.read(np.array([5, 2]), np.array([1, 1]))
    assert fresh.all() and confidence.tolist() == [[0.5] * WIDTH + [0.25] * (GAMMA - WIDTH)] * 2
    counters = Counters(GAMMA)
    counters.begin_serving(None, True)
    for record in (wide, narrow, counted):
        counters.observe(record)
    state = counters.as_dict()
    assert state["drafted_tokens"] == 2 * (GAMMA + 2 * WIDTH) and state["narrow_draft_steps"] == 2
    assert state["verify_tokens"] == 2 * (8 + 4 + 4) and state["decisions"]["verify_all"] == 3
    assert state["verified_per_position"] == [6] * WIDTH + [2] * (GAMMA - WIDTH)
    assert not state["fallbacks"]["invalid_confidence"]
