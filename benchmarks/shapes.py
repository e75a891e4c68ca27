"""Targets of realistic size without their weights: configurations that a server fills with random numbers.

``python -m sglang_adaptive.benchmarks shapes --out DIR qwen3-8b`` writes ``DIR/qwen3-8b/target`` and
``DIR/qwen3-8b/draft``, each a config.json and a tokenizer, to be served with ``--load-format dummy``. A step costs what
it costs with the real weights; what is accepted says benchmarks/acceptance.py. The tokenizer knows a few thousand words
of its own: benchmarks send token ids and serve with ``--skip-tokenizer-init``, but the host's own profiler wants one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The host's profiler draws token ids from 1000 up to a thousand below the last one.
WORDS = 8000


@dataclass(frozen=True)
class Shape:
    """A dense Qwen3 target and the DSpark draft that belongs to it.

    The draft has the target's width, ``draft_layers`` layers that read ``captured`` of the target's, a vanilla Markov
    head of rank ``markov_rank`` and a confidence head with Markov features, as the public Qwen3 drafts have.
    """

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    captured: tuple[int, ...]
    context: int = 40960
    dtype: str = "bfloat16"
    draft_layers: int = 5
    markov_rank: int = 256
    gamma: int = 7

    def parameters(self) -> tuple[int, int]:
        """Of the target and of the draft, which shares the target's embedding and head."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.mlp
        heads = 2 * self.vocabulary * self.markov_rank + len(self.captured) * self.hidden**2
        return self.layers * layer + 2 * self.vocabulary * self.hidden, self.draft_layers * layer + heads

    def target(self) -> dict[str, Any]:
        """The target's config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_hidden_layers": self.layers,
            **self._shared(),
        }

    def draft(self) -> dict[str, Any]:
        """The draft's config.json."""
        return {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "num_hidden_layers": self.draft_layers,
            "layer_types": ["full_attention"] * self.draft_layers,
            "block_size": self.gamma,
            "num_target_layers": self.layers,
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "dflash_config": {
                "target_layer_ids": list(self.captured),
                "mask_token_id": self.vocabulary - 1,
                "num_target_layers": self.layers,
            },
            **self._shared(),
        }

    def _shared(self) -> dict[str, Any]:
        theta = 1_000_000.0
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": self.context,
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": self.dtype,
        }


SHAPES = {
    "qwen3-8b": Shape(4096, 12288, 36, 32, 8, 128, 151936, (2, 10, 18, 26, 34)),
    "qwen3-14b": Shape(5120, 17408, 40, 40, 8, 128, 151936, (2, 11, 20, 29, 38)),
    # For machines without a GPU: the same parts, as small as they get.
    "small": Shape(64, 128, 3, 4, 2, 16, 1024, (0, 1), 4096, "float32", draft_layers=1, markov_rank=8),
}


def _tokenizer(vocabulary: int) -> dict[str, Any]:
    """A tokenizer of whole words, w0, w1 and so on, in the format of the tokenizers library."""
    words = {f"w{place}": place for place in range(min(WORDS, vocabulary - 1))}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }


def write(name: str, folder: Path) -> tuple[Path, Path]:
    """Write the two folders of a shape below ``folder``; returns target and draft. Same name, same files."""
    shape = SHAPES[name]
    paths = folder / name / "target", folder / name / "draft"
    for path, config in zip(paths, (shape.target(), shape.draft()), strict=True):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (path / "tokenizer.json").write_text(json.dumps(_tokenizer(shape.vocabulary)) + "\n")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "w0",
            "bos_token": "w0",
            "eos_token": "w1",
        }
        (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    return paths


def main(argv: Sequence[str]) -> int:
    """Write configurations of realistic targets and their drafts, without weights."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks shapes", description=main.__doc__)
    parser.add_argument("names", nargs="+", choices=SHAPES)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    for name in arguments.names:
        target, draft = write(name, arguments.out)
        of_target, of_draft = (count / 1e9 for count in SHAPES[name].parameters())
        print(f"{target} ({of_target:.3g} billion parameters)\n{draft} ({of_draft:.3g} billion)")
    return 0
