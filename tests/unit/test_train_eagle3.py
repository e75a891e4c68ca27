"""The EAGLE3 trainer of the benchmarks, on a tiny random target: its parts against references, and the whole way."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import tiny_language as language
import torch
from safetensors.torch import load_file

from sglang_adaptive.benchmarks import eagle3_data, eagle3_draft, eagle3_pack, eagle3_training, train_eagle3
from sglang_adaptive.benchmarks.eagle3_data import Chat, Opening
from sglang_adaptive.benchmarks.eagle3_target import Decoder, Target
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.launch import models

HIDDEN, LAYERS, STEPS, WORDS = 64, 5, 4, 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": language.VOCAB,
    "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": True,
    "bos_token_id": language.BOS, "eos_token_id": language.EOS,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # layers this small lose more by a second thread than they gain
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference():
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
        for name, weight in model.named_parameters():
            weight.data.normal_(0, 0.3)  # so that attention and MLP matter
            if "norm" in name:
                weight.data.add_(1.0)
    return model


@pytest.fixture(scope="module")
def target(reference) -> Target:
    return Target(CONFIG, reference.state_dict(), [1, 2, 3], "cpu", torch.float32)


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("target")
    reference.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(CONFIG))
    language.save_tokenizer(path)
    return path


def batch_of(target: Target, texts: int = 3, length: int = 24, start: int = 6) -> eagle3_draft.Batch:
    ids = torch.randint(language.VOCAB, (texts, length), generator=torch.Generator().manual_seed(1))
    final, read = target.look(ids)
    answers = torch.tensor([[start] * texts, [length - STEPS] * texts])
    return eagle3_draft.Batch(ids, final, read, target.log_total(final), answers)


def draft_of(target: Target) -> eagle3_draft.Draft:
    torch.manual_seed(2)
    words = torch.arange(0, language.VOCAB, language.VOCAB // WORDS)[:WORDS]
    example = target.look(torch.arange(12)[None])[1][0]
    return eagle3_draft.Draft(eagle3_draft.draft_config(target, WORDS), words).begin_from(target, example)


def test_the_target_is_the_one_of_transformers(reference, target):
    ids = torch.randint(language.VOCAB, (2, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = reference(ids, output_hidden_states=True)
    final, read = target.look(ids)
    torch.testing.assert_close(final @ target.head.T, found.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        read, torch.cat([found.hidden_states[i + 1] for i in (1, 2, 3)], -1), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(target.log_total(final[0], rows=16), found.logits[0].logsumexp(-1), rtol=1e-4, atol=1e-4)
    decoder = Decoder(target, 2, 70, print)
    for place in range(70):
        logits = decoder(ids[:, place], place)
    torch.testing.assert_close(logits, found.logits[:, -1], rtol=1e-4, atol=1e-4)


def test_conversations_keep_to_the_template(target):
    chat = Chat([5], [6, 7], lambda text: [8, 9])
    given = [Opening([5, 20, 21, 6, 7], "given", True), Opening([5, 20, 6, 7], "given", True)]
    decoder = Decoder(target, 6, 64, print)
    openings = [*given, *(Opening(chat.before) for _ in range(4))]
    found = eagle3_data.write_batch(decoder, openings, chat.after, 10, lambda: False)
    assert found.kind.count("given") + found.kind.count("train") == len(found) > 2
    for ids, start, end, kind in zip(
        found.ids.tolist(), found.start.tolist(), found.end.tolist(), found.kind, strict=True
    ):
        assert ids[start - 2 : start] == chat.after
        assert end == decoder.length or ids[end - 1] == language.EOS
        assert language.EOS not in ids[start : end - 1]
        assert ids[0] == 5
        assert kind == "train" or ids[1] == 20
        assert start <= len(chat.before) + 10 + len(chat.after)
    greedy = found.of_kind("given")[found.greedy[found.of_kind("given")]]
    for row in greedy.tolist():
        final, _ = target.look(found.ids[row : row + 1].long())
        start, end = int(found.start[row]), int(found.end[row])
        best = (final[0] @ target.head.T).argmax(-1)
        assert best[start - 1 : end - 1].tolist() == found.ids[row, start:end].tolist()


def test_a_later_step_sees_what_a_server_would_show_it(target):
    """One row after the other, as when served, gives the same logits as the unrolled training."""
    draft, batch, row, text = draft_of(target), batch_of(target), 9, 1
    steps = list(eagle3_draft.unroll(draft, target, batch, STEPS))
    count = batch.ids.shape[1] - STEPS
    hidden = draft.project(batch.read[text : text + 1, : row + 1])
    for k, step in enumerate(steps):
        embeds = target.embed[batch.ids[text : text + 1, 1 : row + 2 + k]]
        out = draft.midlayer(embeds, hidden, 0, [])[:, -1:]
        at = step.rows.tolist().index(text * count + row)
        torch.testing.assert_close(draft.lm_head(draft.norm(out))[0, 0], step.logits[at], rtol=1e-4, atol=1e-4)
        assert step.token[at] == batch.ids[text, row + 2 + k]
        logits = batch.final[text, row + 1 + k] @ target.head.T
        torch.testing.assert_close(step.wanted[at], logits.softmax(-1)[draft.words], rtol=1e-4, atol=1e-6)
        hidden = torch.cat([hidden, out], 1)


def test_the_loss_falls_on_a_repeated_batch(target):
    draft, batch = draft_of(target), batch_of(target)
    optimiser, losses = torch.optim.Adam(draft.parameters(), 3e-3), []
    for _ in range(12):
        loss, accepted = eagle3_draft.loss_of(eagle3_draft.unroll(draft, target, batch, STEPS), 0.8)
        assert accepted.shape == (STEPS,)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[3] < losses[0]
    assert all(weight.grad is not None and weight.grad.any() for weight in draft.parameters())


def test_mixed_precision_trains_as_full_precision_does(reference):
    half = Target(CONFIG, reference.state_dict(), [1, 2, 3], "cpu", torch.bfloat16)
    full = Target(CONFIG, reference.state_dict(), [1, 2, 3], "cpu", torch.float32)
    losses = []
    for target in (half, full):
        draft, batch = draft_of(full), batch_of(target)
        with eagle3_training.autocast(target):
            loss, _ = eagle3_draft.loss_of(eagle3_draft.unroll(draft, target, batch, STEPS), 0.8)
        loss.backward()
        assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in draft.parameters())
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def run(folder: Path, out: Path, *more: str, stopped: bool = False) -> dict:
    sizes = "--toy --length 48 --gen-batch 24 --sequences 40 --held-out 6 --batch 4 --max-steps 6 --draft-vocab 64"
    args = train_eagle3.arguments(["--target", str(folder), "--out", str(out), *sizes.split(), *more])
    budget = train_eagle3.Budget(0.5, time.monotonic())
    budget.stopped = stopped
    return eagle3_training.run(args, budget)


def test_the_whole_way_writes_what_the_host_loads(folder, target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"source": "given", "text": f"h{i} h3 e4"}) + "\n" for i in range(4)))
    metrics = run(folder, tmp_path / "draft", "--prompts", str(prompts))
    assert metrics == json.loads((tmp_path / "draft" / "METRICS.json").read_text())
    assert [line["step"] for line in metrics["training"]] == [1, 6]
    assert set(metrics["acceptance"]) == {"self", "given"}
    for each in metrics["acceptance"].values():
        for found in each.values():
            assert found["survival"] == sorted(found["survival"], reverse=True) and len(found["survival"]) == 5
            assert found["length"] == pytest.approx(1 + sum(found["survival"]), abs=1e-3)

    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 64 and config["num_hidden_layers"] == 1 and config["fc_norm"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    layer = {
        "self_attn.q_proj": (64, 128), "self_attn.k_proj": (32, 128), "self_attn.v_proj": (32, 128),
        "self_attn.o_proj": (64, 64), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96),
        "input_layernorm": (64,), "hidden_norm": (64,), "post_attention_layernorm": (64,),
    }  # fmt: skip
    assert shapes == {
        **{f"midlayer.{name}.weight": shape for name, shape in layer.items()},
        **{f"fc_norm.{i}.weight": (64,) for i in range(3)},
        "fc.weight": (64, 192),
        "norm.weight": (64,),
        "lm_head.weight": (64, 64),
        "d2t": (64,),
        "t2d": (language.VOCAB,),
    }
    said = weights["d2t"] + torch.arange(64)
    assert said.tolist() == weights["t2d"].nonzero()[:, 0].tolist()
    assert language.EOS in said.tolist()

    batch, read_back = batch_of(target), eagle3_draft.load(tmp_path / "draft")
    assert torch.equal(read_back.words, said)
    (small := tmp_path / "small").mkdir()
    models._restore_draft(tmp_path / "draft" / "draft.gguf", small)
    eight_bit = eagle3_draft.load(small)
    assert torch.equal(eight_bit.words, said)
    both = [next(eagle3_draft.unroll(draft, target, batch, 1)).logits for draft in (read_back, eight_bit)]
    assert (both[0] - both[1]).abs().max() < 0.05 * both[0].abs().max()


def test_a_signal_still_leaves_a_checkpoint(folder, tmp_path):
    metrics = run(folder, tmp_path / "draft", stopped=True)
    assert metrics["training"] == [] and metrics["acceptance"] == {}
    assert len(eagle3_draft.load(tmp_path / "draft").words) == 64

    budget, before = train_eagle3.Budget(1.0, time.monotonic()), signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, budget._stop)
        assert not budget.over()
        os.kill(os.getpid(), signal.SIGTERM)
        assert budget.over() and budget.over(budget.share(1.0))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_layers_that_no_draft_can_read_are_refused(folder, tmp_path):
    with pytest.raises(AdaptiveError, match="layers 0 to 3"):
        run(folder, tmp_path / "draft", "--layer-ids", "1", "4")


def test_rows_of_odd_width_stay_as_they_are(tmp_path):
    from safetensors.torch import save_file

    weights = {"a": torch.randn(4, 33).bfloat16(), "d2t": torch.arange(7) * 5000}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    eagle3_pack.pack(tmp_path, tmp_path / "x.gguf")
    (out := tmp_path / "out").mkdir()
    models._restore_draft(tmp_path / "x.gguf", out)
    assert all(torch.equal(found, weights[name]) for name, found in load_file(out / "model.safetensors").items())
