"""Simulated acceptance: the rates and the confidences are as stated, and the same whoever asks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from sglang_adaptive.benchmarks import acceptance, acceptance_server, config, report, shapes
from sglang_adaptive.benchmarks.acceptance import Fates, chances, read, request_key
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.patches import simulated_acceptance as patches

FILES = sorted((Path(acceptance.__file__).parent / "acceptance_files").glob("*.toml"))
TWO_KINDS = """
name = "two"
source = "made up"
seed = 3
[[kinds]]
name = "easy"
share = 3
rates = [0.9, 0.8, 0.7]
auc = 0.8
ece = 0.05
[[kinds]]
name = "hard"
share = 1
survival = [0.5, 0.1, 0.01]
auc = 0.7
ece = -0.03
"""


@pytest.fixture
def two(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(TWO_KINDS)
    return read(path)


def auc_of(confidence: np.ndarray, passed: np.ndarray) -> float:
    order = np.argsort(confidence)
    ranks = np.empty(len(order))
    ranks[order] = np.arange(1, len(order) + 1)
    good = passed.sum()
    return (ranks[passed].sum() - good * (good + 1) / 2) / (good * (len(order) - good))


@pytest.mark.parametrize(("rate", "auc", "ece"), [(0.84, 0.78, 0.05), (0.3, 0.9, -0.04), (0.5, 0.6, 0.0)])
def test_confidences_have_the_stated_quality(rate, auc, ece):
    truth, heard = chances(rate, auc, ece)
    assert truth.mean() == pytest.approx(rate, abs=1e-3)
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(truth), size=200_000)
    passed = rng.random(drawn.size) < truth[drawn]
    assert passed.mean() == pytest.approx(rate, abs=0.005)
    assert auc_of(heard[drawn] + 1e-9 * rng.random(drawn.size), passed) == pytest.approx(auc, abs=0.01)
    assert heard[drawn].mean() - passed.mean() == pytest.approx(ece, abs=0.006)
    assert (np.diff(heard) >= 0).all()


def test_survival_becomes_conditional_rates_and_shares_add_up(two):
    easy, hard = two.kinds
    assert (easy.share, hard.share) == (0.75, 0.25)
    assert hard.rates == pytest.approx((0.5, 0.2, 0.1))
    assert easy.lengths(2) == pytest.approx(1 + 0.9 + 0.72)
    shown = two.describe(2)
    assert shown["simulated"] is True and shown["kinds"][1]["rates"] == pytest.approx([0.5, 0.2])
    assert shown["expected_accept_length"] == pytest.approx(0.75 * 2.62 + 0.25 * 1.6)


def walk(fates: Fates, slot: int, verify: int, begin: int = 5, end: int = 1500) -> tuple[list[int], list[int]]:
    """Positions that an arm verifying ``verify`` drafts decodes from, and drafts accepted at each."""
    runs, confidence = fates.look(torch.full((end,), slot), torch.arange(end))
    assert confidence.shape == (end, fates.gamma) and confidence.dtype == torch.float32
    runs, at, places, accepted = runs.tolist(), begin, [], []
    while at < end:
        places.append(at)
        accepted.append(min(runs[at], verify))
        at += 1 + accepted[-1]
    return places, accepted


def test_rates_are_the_stated_ones_for_every_verify_length(two):
    fates = Fates(two, 3, 40, "cpu")
    fates.admit(range(40), [request_key([number, 7]) for number in range(40)])
    for verify in (1, 2, 3):
        accepted = np.concatenate([walk(fates, slot, verify)[1] for slot in range(40)])
        expected = sum(kind.share * (kind.lengths(verify)) for kind in two.kinds)
        # requests of a kind with long steps take fewer steps: weigh by request instead
        per_request = [1 + np.mean(walk(fates, slot, verify)[1]) for slot in range(40)]
        assert np.mean(per_request) == pytest.approx(expected, rel=0.06)
        assert accepted.max() == verify
    easy = [slot for slot in range(40) if 1 + np.mean(walk(fates, slot, 3)[1]) > 2.3]
    accepted = np.concatenate([walk(fates, slot, 3)[1] for slot in easy])
    for place, rate in enumerate((0.9, 0.8, 0.7)):
        reached = accepted >= place
        assert (accepted[reached] > place).mean() == pytest.approx(rate, abs=0.02)
    assert len(easy) == pytest.approx(30, abs=8)


def test_a_position_has_the_same_fate_on_every_server_and_whichever_way_it_is_reached(two):
    """Two servers give the request another slot and batch, one verifies less: where they meet, they agree."""
    first, second = Fates(two, 3, 8, "cpu"), Fates(two, 3, 64, "cpu")
    key = request_key([1, 2, 3])
    first.admit([2], [key])
    second.admit([9, 50], [request_key([4]), key])
    for at in (0, 17, 900, acceptance.POSITIONS + 17):
        mine = first.look(torch.tensor([2]), torch.tensor([at]))
        theirs = second.look(torch.tensor([9, 50]), torch.tensor([3, at]))
        assert torch.equal(mine[0], theirs[0][1:]) and torch.equal(mine[1], theirs[1][1:])
    # A draft of the token at t passes by its own luck: a later start sees the rest of the same luck.
    luck = acceptance.draws(two.seed, key)[1]
    run = first.look(torch.tensor([2]), torch.tensor([100]))[0]
    again = Fates(two, 1, 8, "cpu")
    again.admit([2], [key])
    alone = [int(again.look(torch.tensor([2]), torch.tensor([100 + j]))[0]) for j in range(3)]
    assert (int(run) > 0) == bool(alone[0]) and luck[101] < 1
    assert request_key([1, 2, 3]) != request_key([1, 2, 4])


def test_a_slot_that_is_handed_on_gets_the_new_request(two):
    fates = Fates(two, 3, 4, "cpu")
    fates.admit([1], [11])
    before = fates.look(torch.full((64,), 1), torch.arange(64))
    fates.admit([1], [12])
    after = fates.look(torch.full((64,), 1), torch.arange(64))
    assert not torch.equal(before[1], after[1])
    fates.admit([1, 2], [11, 12])
    assert torch.equal(before[1], fates.look(torch.full((64,), 1), torch.arange(64))[1])


def test_a_short_file_and_nonsense_are_refused(two, tmp_path):
    with pytest.raises(AdaptiveError, match="rates for 3 positions, but the draft has 4"):
        Fates(two, 4, 4, "cpu")
    for text in (
        TWO_KINDS.replace("rates = [0.9", "rates = [1.9"),
        TWO_KINDS.replace("auc = 0.8", "auc = 0.3"),
        TWO_KINDS.replace('source = "made up"', ""),
        TWO_KINDS.replace("survival", "rates = [0.5]\nsurvival"),
        "not toml",
    ):
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(AdaptiveError, match="describes no acceptance"):
            read(tmp_path / "bad.toml")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_files_that_come_along_can_be_read_and_name_their_source(path):
    found = read(path)
    assert 2 < found.describe(7)["expected_accept_length"] < 4
    assert "published" in found.source and found.name == path.stem


class Proposal(msgspec.Struct, frozen=True):
    confidence: object
    confidence_raw: object
    folded: bool = True


def test_the_patches_replace_confidences_and_respect_verify_lengths(two, monkeypatch):
    monkeypatch.setattr(patches, "_mode", patches._Mode())
    patches.begin(two)
    pool = SimpleNamespace(req_to_token=torch.zeros(6, 8))
    arguments = SimpleNamespace(load_format="dummy")
    runner = SimpleNamespace(req_to_token_pool=pool, server_args=arguments)
    injector = SimpleNamespace(model_runner=runner, verify_num_draft_tokens=4, device="cpu")
    requests = [SimpleNamespace(origin_input_ids=[place]) for place in (1, 4)]
    prefill = SimpleNamespace(reqs=requests, req_pool_indices_cpu=torch.tensor([1, 4]))
    batch = SimpleNamespace(req_pool_indices=torch.tensor([4, 1]), seq_lens=torch.tensor([30, 40]))
    proposal = Proposal(torch.zeros(2, 3), None)
    assert patches._hear(proposal, None, batch=batch) is None, "nothing is simulated before the first prefill"
    patches._admit(injector, prefill)
    heard = patches._hear(proposal, None, batch=batch)
    fates = Fates(two, 3, 6, "cpu")
    fates.admit([1, 4], [request_key([1]), request_key([4])])
    run, confidence = fates.look(batch.req_pool_indices, batch.seq_lens)
    assert torch.equal(heard.confidence, confidence) and heard.folded is False

    bonus = torch.tensor([5, 6])
    zeros = torch.zeros(2, dtype=torch.int32)
    correct, same, trimmed = patches._accept((zeros, bonus, zeros), gamma=3)
    assert torch.equal(correct, run.int()) and same is bonus and correct.dtype == torch.int32
    layout = SimpleNamespace(verify_lens=torch.tensor([1, 3]))
    correct, _, trimmed = patches._accept((zeros, bonus, zeros), gamma=3, cutoff_layout=layout)
    assert correct[0] == 0 and correct[1] == min(int(run[1]), 2)
    assert torch.equal(correct + trimmed, run.int())
    patches._mode.run = torch.tensor([3, 1])
    correct, _, trimmed = patches._accept((zeros, bonus, zeros), gamma=2)
    assert correct.tolist() == [2, 1] and not trimmed.any(), "a shorter draft has no more"

    arguments.load_format = "auto"
    with pytest.raises(AdaptiveError, match="--load-format dummy"):
        patches._admit(injector, prefill)


def test_the_server_needs_a_file_and_dummy_weights(monkeypatch, tmp_path):
    monkeypatch.delenv(acceptance.VARIABLE, raising=False)
    with pytest.raises(AdaptiveError, match="ADAPTIVE_BENCH_ACCEPTANCE is not set"):
        acceptance_server.main([])
    monkeypatch.setenv(acceptance.VARIABLE, str(FILES[0]))
    target, _ = shapes.write("small", tmp_path)
    with pytest.raises(AdaptiveError, match="add --load-format dummy"):
        acceptance_server.main(["--model-path", str(target)])


def test_a_sweep_with_simulated_acceptance_says_so(tmp_path):
    path = tmp_path / "sweep.toml"
    arm = '[[arms]]\nname = "a"\n'
    path.write_text(f'name = "s"\nacceptance = "code-weak.toml"\nprompts = {{}}\n{arm}')
    sweep = config.read(path)
    assert sweep.server[-1] == "sglang_adaptive.benchmarks.acceptance_server"
    assert Path(sweep.env[acceptance.VARIABLE]).name == "code-weak.toml"
    described = read(Path(sweep.acceptance)).describe(7)
    (line,) = report.simulated({"acceptance": described})
    assert "ACCEPTANCE IS SIMULATED" in line and "0.605" in line and "2.32 tokens per step" in line
    assert report.simulated({}) == []
    path.write_text(f'name = "s"\nacceptance = "no-such.toml"\nprompts = {{}}\n{arm}')
    with pytest.raises(AdaptiveError, match=r"no-such.toml for simulated acceptance is neither in"):
        config.read(path)


def test_shapes_have_the_parameters_that_their_names_promise(tmp_path, capsys):
    assert shapes.SHAPES["qwen3-8b"].parameters()[0] == pytest.approx(8.19e9, rel=0.01)
    assert shapes.SHAPES["qwen3-14b"].parameters()[0] == pytest.approx(14.77e9, rel=0.01)
    assert shapes.main(["small", "--out", str(tmp_path)]) == 0
    assert str(tmp_path / "small" / "draft") in capsys.readouterr().out
    from transformers import AutoConfig, AutoTokenizer

    target = AutoConfig.from_pretrained(tmp_path / "small" / "target")
    assert target.vocab_size == shapes.SHAPES["small"].vocabulary
    assert len(AutoTokenizer.from_pretrained(tmp_path / "small" / "target")) == target.vocab_size - 1
    # The host's profiler draws token ids from 1000 up to a thousand below the last one.
    shapes.write("qwen3-8b", tmp_path)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "qwen3-8b" / "target")) == shapes.WORDS > 2000
