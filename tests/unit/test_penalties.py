"""The penalties of a verified window against the host's own, applied token by token."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sampling import penaltylib

from sglang_adaptive import activation, family
from sglang_adaptive.patches import eagle_sampling, min_p, sampling
from sglang_adaptive.runtime.penalties import Penalties

VOCAB, EOS, WIDTH = 40, 2, 5
SETTINGS = (
    {"frequency_penalty": 0.8},
    {},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.7},
    {"min_new_tokens": 9},
    {"frequency_penalty": -0.5, "presence_penalty": 0.4, "repetition_penalty": 1.2, "min_new_tokens": 4},
)
PLAIN = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}


def scale(logits: torch.Tensor, by: torch.Tensor) -> None:
    """What the host compiles."""
    logits.copy_(torch.where(logits < 0, logits * by, logits / by))


def make_request(settings: dict, slot: int, prompt: int = 3) -> SimpleNamespace:
    tokenizer = SimpleNamespace(eos_token_id=EOS, additional_stop_token_ids=None)
    params = SimpleNamespace(**{**PLAIN, **settings}, stop_token_ids={7})
    return SimpleNamespace(
        sampling_params=params,
        origin_input_ids=[1] * prompt,
        output_ids=[],
        eos_token_ids={EOS},
        tokenizer=tokenizer,
        slot=slot,
        said=[],
    )


class Owner(SimpleNamespace):
    """A batch, to which the host keeps a weak reference."""


class Host:
    """The scheduler's side: a batch of requests, whose ``output_ids`` follow what was said a step late."""

    def __init__(self, requests: list) -> None:
        self.pool = SimpleNamespace(req_generation=torch.zeros(32, dtype=torch.int64))
        self.requests = requests

    def batch(self, mixed: int = 0, anchor_in_cache: bool = False) -> SimpleNamespace:
        slots = torch.tensor([request.slot for request in self.requests])
        lengths = [len(request.origin_input_ids) + len(request.said) for request in self.requests]
        info = SimpleNamespace(acc_additive_penalties=torch.zeros(1), acc_scaling_penalties=None, vocab_size=VOCAB)
        return SimpleNamespace(
            reqs=self.requests,
            req_pool_indices_cpu=slots,
            req_to_token_pool=self.pool,
            seq_lens=torch.tensor(lengths) - (0 if anchor_in_cache else 1),
            sampling_info=info,
            decoding_reqs=self.requests[len(self.requests) - mixed :] if mixed else None,
            input_ids=torch.tensor([request.said[-1] if request.said else 0 for request in self.requests]),
        )

    def anchors(self) -> torch.Tensor:
        return torch.tensor([request.said[-1] for request in self.requests])


def expected(request, said: list[int], logits: torch.Tensor) -> torch.Tensor:
    """One row of logits as the host penalises it for a request that has said ``said``."""
    owner = Owner(reqs=[request], device="cpu")
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(
        VOCAB,
        owner,
        {
            penaltylib.BatchedFrequencyPenalizer,
            penaltylib.BatchedMinNewTokensPenalizer,
            penaltylib.BatchedPresencePenalizer,
            penaltylib.BatchedRepetitionPenalizer,
        },
    )
    for token in said:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    row = logits.clone().unsqueeze(0)
    additive = torch.zeros(1, VOCAB)
    orchestrator.accumulate_additive_penalties(additive)
    row += additive
    scaling = orchestrator.accumulate_scaling_penalties()
    if scaling is not None:
        scale(row, scaling)
    return row[0]


@pytest.fixture
def host() -> Host:
    return Host([make_request(settings, slot) for slot, settings in enumerate(SETTINGS)])


def run_step(host: Host, penalties: Penalties, seed: int, late: bool) -> int:
    """A verified step: every position of the window is as the host has it after the drafts before. Returns how many
    of them the penalties changed."""
    generator = torch.Generator().manual_seed(seed)
    requests = len(host.requests)
    logits = torch.randn(requests * WIDTH, VOCAB, generator=generator) * 3
    window = torch.randint(0, 12, (requests, WIDTH - 1), generator=generator)
    step = penalties.begin_decode(host.batch(), host.anchors(), window)
    ours = logits.clone()
    step.apply(ours, WIDTH)
    for row, request in enumerate(host.requests):
        for position in range(WIDTH):
            said = request.said + window[row, :position].tolist()
            found, wanted = ours[row * WIDTH + position], expected(request, said, logits[row * WIDTH + position])
            torch.testing.assert_close(found, wanted, msg=f"request {row}, position {position}")
    lengths = torch.randint(1, WIDTH + 1, (requests,), generator=generator)
    tokens = torch.cat([window, torch.randint(0, 12, (requests, 1), generator=generator)], dim=1)
    step.commit(tokens, lengths)
    for row, request in enumerate(host.requests):
        if late:
            request.output_ids = list(request.said)
        request.said += tokens[row, : lengths[row]].tolist()
        if not late:
            request.output_ids = list(request.said)
    return int((ours != logits).any(dim=-1).sum())


@pytest.mark.parametrize("late", [True, False], ids=["overlap", "sync"])
def test_every_position_sees_the_tokens_before_it(host, late):
    penalties = Penalties()
    for request in host.requests:
        request.said = [5]
        request.output_ids = [] if late else [5]
    assert all(run_step(host, penalties, seed, late) > 0 for seed in range(5))


def test_requests_move_leave_and_join(host):
    penalties = Penalties()
    everyone = host.requests
    for request in everyone:
        request.said = [4]
    seeds = itertools.count()
    assert run_step(host, penalties, next(seeds), late=True) > 0
    for order in ([3, 0, 5, 4], [5, 1, 0], [2, 5, 0, 1]):
        for request in everyone:
            if request not in host.requests:
                request.output_ids = list(request.said)
        host.requests = [everyone[i] for i in order]
        assert run_step(host, penalties, next(seeds), late=True) > 0


def test_a_retracted_request_starts_from_what_the_scheduler_kept(host):
    """What a step in flight said is dropped at a retraction; the prefill that follows samples it anew."""
    penalties = Penalties()
    for request in host.requests:
        request.said = [6]
    run_step(host, penalties, 0, late=True)
    victim = host.requests[5]
    host.pool.req_generation[victim.slot] += 1
    victim.said = list(victim.output_ids)
    everyone, host.requests = host.requests, [victim]
    logits = torch.randn(1, VOCAB)
    batch = host.batch(anchor_in_cache=True)
    batch.sampling_info.acc_additive_penalties = torch.zeros(1, VOCAB)
    batch.sampling_info.acc_scaling_penalties = torch.ones(1, VOCAB)
    assert penalties.begin_prefill(batch) is None
    row = logits + batch.sampling_info.acc_additive_penalties
    scale(row, batch.sampling_info.acc_scaling_penalties)
    torch.testing.assert_close(row[0], expected(victim, victim.said, logits[0]))
    victim.said.append(11)
    host.requests = everyone
    run_step(host, penalties, 1, late=True)


def test_requests_that_decode_in_mixed_steps(host):
    """Each mixed step adds a token that neither a verified step nor the scheduler has counted."""
    penalties = Penalties()
    for request in host.requests:
        request.said = [6]
    run_step(host, penalties, 0, late=True)
    requests = len(host.requests)
    for token in (3, 9, 3):
        batch = host.batch(mixed=requests, anchor_in_cache=True)
        batch.sampling_info.acc_additive_penalties = torch.zeros(requests, VOCAB)
        batch.sampling_info.acc_scaling_penalties = torch.ones(requests, VOCAB)
        step = penalties.begin_prefill(batch)
        logits = torch.randn(requests, VOCAB)
        rows = logits + batch.sampling_info.acc_additive_penalties
        scale(rows, batch.sampling_info.acc_scaling_penalties)
        for row, request in enumerate(host.requests):
            torch.testing.assert_close(rows[row], expected(request, request.said, logits[row]))
        step.commit(torch.full((requests, 1), token), torch.ones(requests, dtype=torch.int64))
        for request in host.requests:
            request.output_ids = list(request.said)
            request.said.append(token)
    run_step(host, penalties, 1, late=True)


def test_without_penalties_nothing_is_kept(host):
    host.requests = host.requests[1:2]
    host.requests[0].said = [1]
    batch = host.batch()
    assert Penalties().begin_decode(batch, host.anchors()) is None
    assert batch.sampling_info.acc_additive_penalties is None
    batch.sampling_info = None
    assert Penalties().begin_decode(batch, host.anchors()) is None


def test_min_p_keeps_what_the_hosts_sampler_keeps():
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(6, VOCAB, generator=generator).mul(2).softmax(-1)
    floors = torch.tensor([0.0, 0.1, 1.0])
    info = SimpleNamespace(need_min_p_sampling=True, min_ps=floors)
    kept = sampling._min_p(probs.view(3, 2, VOCAB), sampling_info=info, draft_token_num=2)
    torch.testing.assert_close(kept.sum(-1), torch.ones(3, 2))
    assert torch.equal(kept[0] > 0, probs[:2] > 0)
    for row in (2, 3):
        assert torch.equal(kept.view(6, -1)[row] > 0, probs[row] >= 0.1 * probs[row].max())
    assert ((kept[2] > 0).sum(-1) == 1).all()
    info.need_min_p_sampling = False
    assert sampling._min_p(probs, sampling_info=info, draft_token_num=2) is probs


@pytest.mark.parametrize(
    ("changes", "noop"),
    [
        ({}, True),
        ({"acc_additive_penalties": torch.zeros(1)}, False),
        ({"need_min_p_sampling": True}, False),
    ],
)
def test_accepting_in_a_graph_is_not_exact_with_penalties_or_min_p(changes, noop):
    info = SimpleNamespace(**{"acc_additive_penalties": None, "need_min_p_sampling": False} | changes)
    assert sampling._is_noop(lambda info: True, info) is noop
    assert sampling._is_noop(lambda info: False, info) is False


@pytest.mark.parametrize(
    ("drafts", "seeded", "refused"),
    [
        (family.EAGLE, False, True),
        (family.NEXTN, True, True),
        (family.DSPARK, True, True),
        (family.DSPARK, False, False),
    ],
)
def test_a_request_whose_min_p_would_not_be_applied_is_refused(monkeypatch, drafts, seeded, refused):
    monkeypatch.setattr(activation, "_family", drafts)
    monkeypatch.setattr(min_p, "_seeded", lambda: seeded)
    request = make_request({"min_p": 0.1}, 0)
    sentence = min_p._refuse(None, None, request)
    assert (sentence is not None) == refused
    if refused:
        assert sentence.endswith("drop min_p from the request.") and sentence.count(". ") == 0
    request.sampling_params.min_p = 0.0
    assert min_p._refuse(None, None, request) is None
    assert min_p._refuse("another complaint", None, request) == "another complaint"


def test_an_eagle_verification_is_penalised_and_counted(host):
    """The host's step sees penalised logits, and what it accepts is counted for the next."""
    for request in host.requests:
        request.said = [5]
    requests = len(host.requests)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        window = torch.randint(0, 12, (requests, WIDTH), generator=generator)
        window[:, 0] = host.anchors()
        logits = torch.randn(requests * WIDTH, VOCAB, generator=generator)
        lengths = torch.randint(1, WIDTH + 1, (requests,), generator=generator)
        batch = host.batch()
        batch.req_to_token_pool = host.pool
        batch.spec_info = SimpleNamespace(retrieve_index=window, draft_token=window.flatten().to(torch.int32))
        output = SimpleNamespace(next_token_logits=logits.clone())
        worker = SimpleNamespace(forward_batch_generation=lambda output=output: SimpleNamespace(logits_output=output))
        predicted = torch.randint(0, 12, (requests, WIDTH), generator=generator)

        def original(batch, *, target_worker, lengths=lengths, predicted=predicted):
            target_worker.forward_batch_generation()
            return SimpleNamespace(next_token_ids=predicted.flatten().to(torch.int32), accept_lens=lengths)

        eagle_sampling._verify(original, batch, target_worker=worker)
        for row, request in enumerate(host.requests):
            for position in range(WIDTH):
                said = request.said + window[row, 1 : position + 1].tolist()
                place = row * WIDTH + position
                torch.testing.assert_close(output.next_token_logits[place], expected(request, said, logits[place]))
            request.output_ids = list(request.said)
            request.said += predicted[row, : lengths[row]].tolist()
