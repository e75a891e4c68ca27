"""Shapes of the tiny pair, and its DSpark draft in plain torch.

The draft follows the DSpark paper (arXiv 2607.05147) and SGLang's ``Qwen3DSparkModel``: its layers see, as keys and
values, the target's captured layer outputs for all tokens before the anchor, and a block [anchor, mask, mask, ...]
that attends to itself in full; a Markov head adds a bias for the token before; a confidence head tells the chance that
the target accepts.
"""

from __future__ import annotations

import tiny_language as language
import torch
import torch.nn.functional as F
from torch import nn

GAMMA = 7
HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM = 96, 192, 4, 2, 32
TARGET_LAYERS, DRAFT_LAYERS, MARKOV_RANK = 3, 2, 32
CAPTURED = (0, 1)  # target layers whose outputs the draft reads; the host cannot capture the last one
CONTEXT_LENGTH, THETA, EPS = 1024, 10_000.0, 1e-6

SHARED_CONFIG = {
    "vocab_size": language.VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "max_position_embeddings": CONTEXT_LENGTH,
    "rope_theta": THETA,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": language.BOS,
    "eos_token_id": language.EOS,
    "dtype": "float32",
}
TARGET_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": TARGET_LAYERS,
    "mlp_bias": False,
    "pad_token_id": language.EOS,
    **SHARED_CONFIG,
}
DRAFT_CONFIG = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "num_hidden_layers": DRAFT_LAYERS,
    "layer_types": ["full_attention"] * DRAFT_LAYERS,
    "block_size": GAMMA,
    "num_target_layers": TARGET_LAYERS,
    "markov_rank": MARKOV_RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "dflash_config": {
        "target_layer_ids": list(CAPTURED),
        "mask_token_id": language.MASK,
        "num_target_layers": TARGET_LAYERS,
    },
    **SHARED_CONFIG,
}


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, halves of a head rotating together: x [B, heads, N, HEAD_DIM], positions [B, N]."""
    frequency = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angle = (positions[:, None, :, None] * frequency).float()
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class _DraftLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": _linear(HIDDEN, HEADS * HEAD_DIM),
                "k_proj": _linear(HIDDEN, KV_HEADS * HEAD_DIM),
                "v_proj": _linear(HIDDEN, KV_HEADS * HEAD_DIM),
                "o_proj": _linear(HEADS * HEAD_DIM, HIDDEN),
                "q_norm": nn.RMSNorm(HEAD_DIM, EPS),
                "k_norm": nn.RMSNorm(HEAD_DIM, EPS),
            }
        )
        self.mlp = nn.ModuleDict(
            {"gate_proj": _linear(HIDDEN, MLP), "up_proj": _linear(HIDDEN, MLP), "down_proj": _linear(MLP, HIDDEN)}
        )
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)

    def forward(self, rows, context, positions, context_positions, mask):
        attention, mlp = self.self_attn, self.mlp
        normed = self.input_layernorm(rows)
        source = torch.cat([context, normed], dim=1)  # the context enters keys and values without the input norm
        split = lambda x: x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)  # noqa: E731
        query = _rotate(attention["q_norm"](split(attention["q_proj"](normed))), positions)
        source_positions = torch.cat([context_positions, positions], dim=1)
        key = _rotate(attention["k_norm"](split(attention["k_proj"](source))), source_positions)
        value = split(attention["v_proj"](source))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        rows = rows + attention["o_proj"](mixed.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(rows)
        return rows + mlp["down_proj"](F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))


class Draft(nn.Module):
    """Parameters are named as SGLang's ``Qwen3DSparkModel`` names them; embedding and head are the target's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_DraftLayer() for _ in range(DRAFT_LAYERS))
        self.fc = _linear(len(CAPTURED) * HIDDEN, HIDDEN)
        self.hidden_norm = nn.RMSNorm(HIDDEN, EPS)
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        self.markov_head = nn.ModuleDict(
            {
                "markov_w1": nn.Embedding(language.VOCAB, MARKOV_RANK),
                "markov_w2": _linear(MARKOV_RANK, language.VOCAB),
            }
        )
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(HIDDEN + MARKOV_RANK, 1)})

    def forward(self, blocks, captured, anchors, embedding):
        """Hidden rows [B, A, GAMMA, HIDDEN] of ``A`` independent blocks.

        ``blocks`` [B, A, GAMMA] token ids, ``captured`` [B, N, captured layers * HIDDEN] the target's outputs at
        positions 0 to N - 1, ``anchors`` [B, A] the position of each block's first token: it sees what is before.
        """
        batch, count, _ = blocks.shape
        context = self.hidden_norm(self.fc(captured))
        context_positions = torch.arange(captured.shape[1]).expand(batch, -1)
        positions = (anchors[..., None] + torch.arange(GAMMA)).flatten(1)
        before = context_positions[:, None] < anchors.repeat_interleave(GAMMA, 1)[..., None]
        owner = torch.arange(count).repeat_interleave(GAMMA)
        mask = torch.cat([before, (owner[:, None] == owner).expand(batch, -1, -1)], dim=-1)[:, None]
        rows = embedding(blocks.flatten(1))
        for layer in self.layers:
            rows = layer(rows, context, positions, context_positions, mask)
        return self.norm(rows).unflatten(1, (count, GAMMA))

    def bias(self, previous):
        """What the Markov head adds to the logits after each token of ``previous``: [..., VOCAB]."""
        return self.markov_head["markov_w2"](self.markov_head["markov_w1"](previous))

    def confidence(self, hidden, previous):
        """Logit of the chance that the target accepts each row's token: [...]."""
        features = torch.cat([hidden, self.markov_head["markov_w1"](previous)], dim=-1)
        return self.confidence_head["proj"](features).squeeze(-1)
