"""What is heard of EAGLE drafts: by slot, in the host's graphs where it has them and outside where it has none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_worker_v2 as host

from sglang_adaptive.runtime.eagle_draft import AdaptiveEagleDraftWorker, distribution
from sglang_adaptive.runtime.estimate import Estimate

SLOTS, K, VOCAB, HIDDEN = 9, 3, 11, 4


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids, positions, forward_batch):
        return SimpleNamespace(next_token_logits=self.head(forward_batch.hidden).detach())


class Runner:
    """Of the host's model runner what its draft worker calls."""

    def __init__(self):
        self.model = Model()

    def forward(self, forward_batch):
        return SimpleNamespace(logits_output=self.model.forward(None, None, forward_batch))


def batch(slots, mode=ForwardMode.DECODE):
    hidden = torch.randn(len(slots), HIDDEN)
    return SimpleNamespace(req_pool_indices=torch.tensor(slots), forward_mode=mode, hidden=hidden)


@pytest.fixture
def worker(monkeypatch):
    """A draft worker whose host part drafts K - 1 times, and extends as the test says."""
    worker = object.__new__(AdaptiveEagleDraftWorker)
    worker.device, worker.speculative_num_steps = "cpu", K
    worker.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(SLOTS, 1))
    worker._topk1_parents_prealloc = torch.zeros(8, 1)
    worker.draft_runner = Runner()
    worker._estimate, worker._wanted, worker._later, worker._heard = None, None, None, None
    worker._sampling, worker._describe = (None, None), distribution
    worker._tell = AdaptiveEagleDraftWorker.__init__.__globals__["tell"]

    def draft(self, forward_batch):
        return [self.draft_runner.forward(forward_batch) for _ in range(K - 1)]

    monkeypatch.setattr(host.EagleDraftWorker, "draft_forward", draft)
    return worker


@pytest.fixture
def listening(worker):
    worker.wanted = True
    worker.listen_for(Estimate(gamma=K, num_slots=SLOTS, device="cpu"), lambda: worker.wanted)
    return worker


def logits_of(worker, forward_batch):
    return worker.draft_runner.model.head(forward_batch.hidden).detach()


def test_a_draft_is_told_of_by_what_lies_at_its_slots(listening):
    listening._first[5] = torch.tensor([0.8, 0.3])
    listening._temperature[2] = 0.7
    forward_batch = batch([5, 2])
    listening.draft_forward(forward_batch)
    confidence, columns = listening.told(2)
    heard = distribution(logits_of(listening, forward_batch))
    assert columns[0, :K].tolist() == pytest.approx([0.8, *[heard[0, 0].item()] * 2])
    assert columns[:, K].tolist() == pytest.approx([0.3, 0.0])
    assert columns[1, K + 1 : 2 * K].tolist() == pytest.approx([heard[1, 1].item()] * 2)
    assert columns[:, -1].tolist() == pytest.approx([0.0, 0.7])
    # Nothing was learned yet: the draft's maximum is believed.
    torch.testing.assert_close(confidence[0], columns[0, :K])
    assert listening._heard is None, "a draft is no draft-extend"


def test_a_draft_that_nobody_asks_for_costs_nothing(listening, worker, monkeypatch):
    listening.draft_forward(batch([1]))
    before = listening.told(1)[1].clone()
    listening.wanted = False
    monkeypatch.setattr(listening, "_describe", None)
    assert len(listening.draft_forward(batch([1]))) == K - 1
    torch.testing.assert_close(listening.told(1)[1], before, equal_nan=True)


def test_an_eager_draft_extend_keeps_the_first_draft_of_each_slot(listening, monkeypatch):
    def extend(self, batch, result, rows=None):
        output = self.draft_runner.forward(batch).logits_output
        output.next_token_logits = output.next_token_logits[result]  # the host narrows the rows it heard

    monkeypatch.setattr(host.EagleDraftWorker, "_draft_extend_for_decode", extend)
    extended = batch([3, 7], ForwardMode.DRAFT_EXTEND_V2)
    rows = SimpleNamespace(**vars(extended))
    rows.hidden = torch.randn(6, HIDDEN)
    listening._draft_extend_for_decode(rows, torch.tensor([2, 4]))
    wanted = distribution(logits_of(listening, rows)[[2, 4]])
    torch.testing.assert_close(listening._first[[3, 7]], wanted)
    assert not listening._first[[0, 1, 2, 4, 5, 6, 8]].any()


def test_a_draft_extend_in_a_graph_keeps_them_itself(listening, monkeypatch):
    """What the capture runs is what a replay does; nothing is left for the CPU."""
    captured = []

    def capture(self):
        padded = batch([4, 6, 0, 0], ForwardMode.DRAFT_EXTEND_V2)
        captured.append(padded)
        self.draft_runner.model.forward(None, None, padded)
        self.draft_runner.model.forward(None, None, batch([1, 2]))  # a draft's step is none

    monkeypatch.setattr(host.EagleDraftWorker, "_capture_cuda_graphs", capture)
    monkeypatch.setattr(host.EagleDraftWorker, "_draft_extend_for_decode", lambda *_, **__: None)
    listening._capture_cuda_graphs()
    wanted = distribution(logits_of(listening, captured[0]))
    torch.testing.assert_close(listening._first[[4, 6]], wanted[:2])
    assert not listening._first[[1, 2, 3, 5, 7, 8]].any()
    assert "forward" not in vars(listening.draft_runner.model)
    monkeypatch.setattr(listening, "_describe", None)
    # A replay: the host's worker calls nothing that is listened to, whatever was heard before.
    listening._heard = SimpleNamespace(next_token_logits=torch.zeros(2, VOCAB))
    listening._draft_extend_for_decode(batch([4, 6]), None)
    torch.testing.assert_close(listening._first[[4, 6]], wanted[:2])


def test_temperatures_are_kept_once_for_a_batch(listening):
    info = SimpleNamespace(temperatures=torch.tensor([[1.0], [0.5]]), top_ks=torch.tensor([1, 40]))
    listening.ask(SimpleNamespace(sampling_info=info, req_pool_indices=torch.tensor([2, 8])))
    assert listening._temperature[[2, 8]].tolist() == [0.0, 0.5]
    listening._temperature.zero_()
    listening.ask(SimpleNamespace(sampling_info=SimpleNamespace(**vars(info)), req_pool_indices=None))
    assert not listening._temperature.any(), "the same tensors were read again"
    info.temperatures = info.temperatures[1:].clone()
    info.top_ks = info.top_ks[1:].clone()
    listening.ask(SimpleNamespace(sampling_info=info, req_pool_indices=torch.tensor([8])))
    assert listening._temperature[[2, 8]].tolist() == [0.0, 0.5]


def test_without_an_estimate_nothing_is_listened_to(worker, monkeypatch):
    monkeypatch.setattr(host.EagleDraftWorker, "_capture_cuda_graphs", lambda self: vars(self.draft_runner.model))
    worker._describe = None
    assert len(worker.draft_forward(batch([1]))) == K - 1
    worker._capture_cuda_graphs()
    assert "forward" not in vars(worker.draft_runner)
