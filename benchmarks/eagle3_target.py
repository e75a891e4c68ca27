"""The frozen target of train_eagle3: a Llama decoder in plain torch.

It says what a draft reads and what it should say. No server is needed, and a decode step of thousands of rows is one
replay of a CUDA graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

WINDOW = 64  # positions by which the attention of a decode step grows: one CUDA graph for each size


def rotary(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [..., 1, dim / 2] (float32) of integer ``positions`` [...]."""
    frequencies = theta ** -(torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angles = (positions[..., None].float() * frequencies).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the halves of ``x`` [..., heads, dim] in float32; the dtype stays."""
    cos, sin = tables
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Target:
    """Weights of a Llama checkpoint. ``layer_ids`` names the layers whose outputs a draft reads, in order."""

    def __init__(self, config: dict, weights: dict[str, Tensor], layer_ids: list[int], device: str, dtype: torch.dtype):
        self.config, self.layer_ids, self.dtype = config, layer_ids, dtype
        self.device = torch.device(device)
        self.hidden, self.eps, self.vocab = config["hidden_size"], config["rms_norm_eps"], config["vocab_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or self.hidden // self.heads
        self.theta = float((config.get("rope_parameters") or config).get("rope_theta", 10000.0))

        def get(*names: str) -> Tensor:
            return torch.cat([weights[f"model.{name}.weight"] for name in names]).to(self.device, dtype)

        self.layers = [
            {
                "norm1": get(f"layers.{i}.input_layernorm"),
                "norm2": get(f"layers.{i}.post_attention_layernorm"),
                "qkv": get(*(f"layers.{i}.self_attn.{part}_proj" for part in "qkv")),
                "o": get(f"layers.{i}.self_attn.o_proj"),
                "gate_up": get(f"layers.{i}.mlp.gate_proj", f"layers.{i}.mlp.up_proj"),
                "down": get(f"layers.{i}.mlp.down_proj"),
            }
            for i in range(config["num_hidden_layers"])
        ]
        self.embed, self.norm = get("embed_tokens"), get("norm")
        own_head = not config.get("tie_word_embeddings") and "lm_head.weight" in weights
        self.head = weights["lm_head.weight"].to(self.device, dtype) if own_head else self.embed
        ends = config.get("eos_token_id")
        self.ends = torch.tensor(ends if isinstance(ends, list) else [ends], device=self.device)

    @classmethod
    def load(cls, folder: Path, layer_ids: list[int], device: str, dtype: torch.dtype) -> Target:
        """Read config.json and every safetensors file of ``folder``."""
        weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights.update(load_file(file))
        return cls(json.loads((folder / "config.json").read_text()), weights, layer_ids, device, dtype)

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [..., heads, head_dim] of ``projected`` [..., all heads * head_dim]."""
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        return projected.unflatten(-1, (sum(sizes), self.head_dim)).split(sizes, -2)

    def _layers(self, ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> tuple[Tensor, list[Tensor]]:
        x, tables, read = F.embedding(ids, self.embed), rotary(positions, self.head_dim, self.theta), []
        for i, layer in enumerate(self.layers):
            query, key, value = self.split(
                F.linear(F.rms_norm(x, (self.hidden,), layer["norm1"], self.eps), layer["qkv"])
            )
            mixed = attend(i, rotate(query, tables), rotate(key, tables), value)
            x = x + F.linear(mixed.flatten(-2), layer["o"])
            gate, up = F.linear(F.rms_norm(x, (self.hidden,), layer["norm2"], self.eps), layer["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
            if i in self.layer_ids:
                read.append(x)
        return F.rms_norm(x, (self.hidden,), self.norm, self.eps), read

    @torch.no_grad()
    def look(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The final normed hidden [B, N, H] and what a draft reads [B, N, layers read * H] of whole texts [B, N]."""

        def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            parts = (part.transpose(1, 2) for part in (query, key, value))
            return F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2)

        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        final, read = self._layers(ids, positions, attend)
        return final, torch.cat(read, -1)

    def log_total(self, final: Tensor, rows: int = 8192) -> Tensor:
        """Log of the softmax's denominator [M] (float32) for ``final`` [M, H]; so many rows of logits at a time."""
        return torch.cat([F.linear(part, self.head).float().logsumexp(-1) for part in final.split(rows)])


class Decoder:
    """Decodes one token of ``batch`` rows at a time, all rows at the same position, up to ``length`` positions."""

    def __init__(self, target: Target, batch: int, length: int, say: Callable[[str], None]) -> None:
        self.target, self.batch, self.say = target, batch, say
        self.length = -(-length // WINDOW) * WINDOW
        shape = (len(target.layers), 2, batch, self.length, target.kv_heads, target.head_dim)
        self.cache = torch.zeros(shape, device=target.device, dtype=target.dtype)
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=target.device)
        self.position = torch.zeros(1, dtype=torch.long, device=target.device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.eager = not self.tokens.is_cuda

    def _run(self, window: int) -> Tensor:
        target, groups = self.target, self.target.heads // self.target.kv_heads
        seen = torch.arange(window, device=target.device) <= self.position
        mask = seen.expand(self.batch, 1, groups, window).contiguous()

        def attend(i: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache[i]
            keys.index_copy_(1, self.position, key)
            values.index_copy_(1, self.position, value)
            # The queries that share a KV head stand where a longer text would: [B, KV heads, group, head_dim].
            query = query.reshape(self.batch, target.kv_heads, groups, target.head_dim)
            parts = (part[:, :window].transpose(1, 2) for part in (keys, values))
            mixed = F.scaled_dot_product_attention(query, *parts, attn_mask=mask)
            return mixed.reshape(self.batch, 1, target.heads, target.head_dim)

        final, _ = target._layers(self.tokens, self.position.expand(self.batch, 1), attend)
        return F.linear(final[:, 0], target.head)

    def _capture(self, window: int) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run(window)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._run(window)
        self.graphs[window] = graph, logits

    @torch.no_grad()
    def __call__(self, tokens: Tensor, position: int) -> Tensor:
        """Logits [B, vocabulary] of what follows ``tokens`` [B] at ``position``; valid until the next call."""
        self.tokens.copy_(tokens[:, None])
        self.position.fill_(position)
        window = (position // WINDOW + 1) * WINDOW
        if not self.eager and window not in self.graphs:
            try:
                self._capture(window)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.say(f"decoding without CUDA graphs: {str(error).splitlines()[0]}")
                self.eager = True
        if self.eager:
            return self._run(window)
        graph, logits = self.graphs[window]
        graph.replay()
        return logits


def draw(logits: Tensor, temperature: Tensor) -> Tensor:
    """Tokens [B] drawn from ``logits`` [B, V] at ``temperature`` [B], 0 for the most likely (the Gumbel-max trick)."""
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_().clamp_min_(1e-20).log_()
    return (logits.float() - temperature[:, None] * noise).argmax(-1)
