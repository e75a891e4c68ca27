"""A sampled token after a shorter draft is distributed as the target says, also where a trim ends right behind it.

The host accepts over all K columns and cuts off afterwards, so that the column behind the drafts is looked at.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.speculative.dspark import dspark_accept
from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockResult, DraftProposal
from sglang.srt.speculative.dspark_components.dspark_draft_sampler import DsparkDraftSampler
from sglang.srt.speculative.dspark_components.dspark_verify import accept_draft_tokens

from sglang_adaptive.platform_cpu.kernels import chain_speculative_sampling
from sglang_adaptive.runtime.narrow_drafts import NarrowDrafts, _Sampler

GAMMA, WIDTH, VOCAB, REQUESTS = 7, 3, 8, 20_000
TAKEN = (
    *("predicts", "accept_index", "accept_token_num", "candidates", "retrive_index", "uniform_samples"),
    *("uniform_samples_for_final_sampling", "target_probs", "draft_probs"),
)


@pytest.fixture
def target(monkeypatch) -> torch.Tensor:
    """[K + 1, V] probabilities; acceptance is the CPU platform's."""
    monkeypatch.setattr(
        dspark_accept,
        "chain_speculative_sampling_triton",
        lambda **named: chain_speculative_sampling(**{name: named[name] for name in TAKEN}),
    )
    torch.manual_seed(0)
    return torch.softmax(torch.randn(GAMMA + 1, VOCAB), -1)


def in_columns(tokens: torch.Tensor, logits: torch.Tensor) -> DraftBlockResult:
    """As an eager draft, which is padded."""
    narrow = object.__new__(NarrowDrafts)
    narrow._wide = SimpleNamespace(gamma=GAMMA, _draft_sampler=None)
    narrow._narrow = {WIDTH: (SimpleNamespace(_draft_sampler=None), None, None)}
    block = block_of(tokens, logits)
    confidence = torch.ones(REQUESTS, WIDTH)
    proposal = DraftProposal(
        draft_block_ids=torch.zeros(REQUESTS, WIDTH, dtype=torch.long),
        draft_block=block,
        confidence=confidence,
        confidence_raw=confidence,
    )
    return narrow._widened(proposal, WIDTH).draft_block


def in_buffers(tokens: torch.Tensor, logits: torch.Tensor, monkeypatch) -> DraftBlockResult:
    """As a draft in a graph, which is written over an older one of K tokens."""
    old = torch.softmax(torch.randn(VOCAB), -1).log()
    wide = SimpleNamespace(
        out=torch.full((REQUESTS * GAMMA,), 5),
        step_logits=old.expand(REQUESTS, GAMMA, VOCAB).clone(),
        confidence_out=None,
        max_bs=REQUESTS,
        gamma=GAMMA,
        **dict.fromkeys(("model", "_noise", "_tp_sync", "greedy_draft")),
    )

    def made(self, *, gamma, **_):
        self.gamma = self.query_token_num = gamma
        self.out = torch.zeros(REQUESTS * gamma, dtype=torch.long)

    def drafted(self, hidden_states, input_ids):
        self.out.copy_(tokens.reshape(-1))
        self.step_logits.copy_(logits)

    monkeypatch.setattr(DsparkDraftSampler, "__init__", made)
    monkeypatch.setattr(DsparkDraftSampler, "__call__", drafted)
    _Sampler(wide, WIDTH)(torch.zeros(REQUESTS * WIDTH, 1), None)
    return block_of(wide.out.view(REQUESTS, GAMMA), wide.step_logits)


def block_of(tokens: torch.Tensor, logits: torch.Tensor) -> DraftBlockResult:
    return DraftBlockResult(
        draft_tokens=tokens,
        corrected_logits=logits,
        greedy_mask=torch.zeros(REQUESTS, dtype=torch.bool),
        temperatures=torch.ones(REQUESTS),
        greedy_draft=False,
    )


@pytest.mark.parametrize("place", ["columns", "buffers"])
@pytest.mark.parametrize("share", [WIDTH, WIDTH - 1])
def test_the_token_after_the_drafts_is_the_targets(target, monkeypatch, place, share):
    # Drafts of the target's own distribution: every one is accepted.
    tokens = torch.stack([torch.multinomial(target[j], REQUESTS, replacement=True) for j in range(WIDTH)], 1)
    logits = target[:WIDTH].log().expand(REQUESTS, WIDTH, VOCAB).clone()
    block = in_columns(tokens, logits) if place == "columns" else in_buffers(tokens, logits, monkeypatch)
    verified = target.log().expand(REQUESTS, GAMMA + 1, VOCAB).clone()
    verified[:, share + 1 :] = 0.0  # the host fills rows that were not verified
    accepted, bonus, _ = accept_draft_tokens(
        candidates=torch.cat([torch.zeros(REQUESTS, 1, dtype=torch.long), block.draft_tokens], 1),
        target_logits=verified.view(-1, VOCAB),
        draft_block=block,
        sampling_info=SimpleNamespace(
            temperatures=torch.ones(REQUESTS, 1),
            **dict.fromkeys(
                (
                    *("need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling", "is_all_greedy"),
                    "is_any_greedy",
                ),
                False,
            ),
        ),
        draft_input=SimpleNamespace(max_top_k=1, uniform_top_k_value=None),
        gamma=GAMMA,
        verify_num_draft_tokens=GAMMA + 1,
        cutoff_layout=SimpleNamespace(verify_lens=torch.full((REQUESTS,), share + 1)),
    )
    assert (accepted == share).all()
    found = torch.bincount(bonus, minlength=VOCAB) / REQUESTS
    # Four standard deviations of a share among so many.
    bound = 4 * (target[share] * (1 - target[share]) / REQUESTS).sqrt()
    assert ((found - target[share]).abs() < bound).all(), (found, target[share])
