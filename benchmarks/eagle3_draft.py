"""The EAGLE3 draft of train_eagle3: its module, training-time test, acceptance and checkpoint.

The layout is SGLang's (LlamaForCausalLMEagle3). Row ``t`` knows token ``t + 1`` and a hidden state: the target's of
position ``t`` or, on later steps of a draft, the draft's own of the step before. It predicts token ``t + 2``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sglang_adaptive.benchmarks.eagle3_target import Target, rotary, rotate

SHARED_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size",
    "hidden_act", "max_position_embeddings", "bos_token_id", "eos_token_id",
)  # fmt: skip


class RMSNorm(nn.Module):
    """In float32, whatever comes in; the dtype stays."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Layer(nn.Module):
    """One decoder layer over [embedding, hidden], unrolled over the steps of a draft."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, mlp, self.head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        self.theta = config["rope_parameters"]["rope_theta"]
        queries, keys = (config[name] * self.head_dim for name in ("num_attention_heads", "num_key_value_heads"))
        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False)  # noqa: E731
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(2 * hidden, queries),
                "k_proj": linear(2 * hidden, keys),
                "v_proj": linear(2 * hidden, keys),
                "o_proj": linear(queries, hidden),
            }
        )
        self.mlp = nn.ModuleDict(
            {"gate_proj": linear(hidden, mlp), "up_proj": linear(hidden, mlp), "down_proj": linear(mlp, hidden)}
        )
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, RMSNorm(hidden, config["rms_norm_eps"]))

    def forward(self, embeds: Tensor, hidden: Tensor, step: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The hidden states [B, N, H] after draft step ``step`` of rows at their position + ``step``.

        A row sees the rows of step 0 up to its own place, and of later steps those of its own chain, from ``cache``.
        """
        rows = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)
        tables = rotary(torch.arange(rows.shape[1], device=rows.device) + step, self.head_dim, self.theta)
        parts = [self.self_attn[f"{name}_proj"](rows).unflatten(-1, (-1, self.head_dim)) for name in "qkv"]
        query, key = (rotate(part, tables).transpose(1, 2) for part in parts[:2])
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, parts[2].transpose(1, 2)))
        cache.append((key, value))
        query = query * self.head_dim**-0.5
        future = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool, device=rows.device).triu(1)
        scores = [(query @ cache[0][0].transpose(-1, -2)).masked_fill(future, float("-inf"))]
        scores += [(query * key).sum(-1, keepdim=True) for key, _ in cache[1:]]
        weights = torch.cat(scores, -1).float().softmax(-1)
        mixed = weights[..., : rows.shape[1]].to(value.dtype) @ cache[0][1]
        for i, (_, value) in enumerate(cache[1:]):
            mixed = mixed + weights[..., rows.shape[1] + i, None].to(value.dtype) * value
        hidden = hidden + self.self_attn["o_proj"](mixed.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(hidden)
        return hidden + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed))


class Draft(nn.Module):
    """Parameters are named as in EAGLE3 checkpoints. The embedding is the target's and stands in no checkpoint.

    ``words`` [draft vocabulary] are the target's token ids that the draft can say, ascending.
    """

    def __init__(self, config: dict, words: Tensor) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.config = config
        reads = len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        self.fc_norm = nn.ModuleList(RMSNorm(hidden, eps) for _ in range(reads))
        self.fc = nn.Linear(reads * hidden, hidden, bias=False)
        self.midlayer = Layer(config)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, len(words), bias=False)
        self.register_buffer("words", words, persistent=False)

    def project(self, read: Tensor) -> Tensor:
        """The hidden state [..., H] of step 0 from what is read of the target [..., layers read * H]."""
        chunks = read.chunk(len(self.fc_norm), -1)
        return self.fc(torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1))

    @torch.no_grad()
    def begin_from(self, target: Target, read: Tensor) -> Draft:
        """Start as the target's last layer, applied to the last of its states that are read.

        ``read`` [M, layers read * H] is an example of them. The hidden states of a draft have unit
        size, so what the target's layer adds is scaled by the size of the target's. What concerns the embedding and the
        other states starts small.
        """
        hidden, last, layer = target.hidden, target.layers[-1], self.midlayer
        size = read[:, -hidden:].float().square().mean(-1).sqrt().median()
        for linear in (self.fc, *layer.self_attn.values()):
            linear.weight.normal_(0, 0.02)
        self.fc.weight[:, -hidden:] += torch.eye(hidden, device=self.fc.weight.device)
        scale = last["norm1"].float()
        for name, weight in zip("qkv", target.split((last["qkv"].float() * scale).T), strict=True):
            layer.self_attn[f"{name}_proj"].weight[:, hidden:] = weight.flatten(-2).T
        layer.self_attn["o_proj"].weight.copy_(last["o"].float() / size)
        gate, up = (last["gate_up"].float() * last["norm2"].float()).chunk(2)
        for name, weight in (("gate", gate), ("up", up), ("down", last["down"].float() / size)):
            layer.mlp[f"{name}_proj"].weight.copy_(weight)
        self.norm.weight.copy_(target.norm)
        self.lm_head.weight.copy_(target.head[self.words])
        return self


class Batch(NamedTuple):
    """Whole texts and what the target makes of them."""

    ids: Tensor  # [B, N] int64
    final: Tensor  # [B, N, H]
    read: Tensor  # [B, N, layers read * H]
    log_total: Tensor  # [B, N] float32
    answers: Tensor  # [2, B] int64: start and end of the answers, on the CPU


class Step(NamedTuple):
    """What a draft says at one of its steps, in ``rows`` [M] of the batch's B * R."""

    rows: Tensor
    logits: Tensor  # [M, draft vocabulary] float32
    wanted: Tensor  # [M, draft vocabulary] float32: the target's probabilities
    token: Tensor  # [M] what the text says


def unroll(draft: Draft, target: Target, batch: Batch, steps: int, whole: bool = False) -> Iterator[Step]:
    """Training-time test: ``steps`` draft steps from every place, on the text's tokens and the draft's own states.

    A step has the rows that predict a token of the answer; ``whole`` leaves only the places of which all steps do.
    """
    ids, count = batch.ids, batch.ids.shape[1] - steps
    place, (start, end) = torch.arange(count), batch.answers[:, :, None]
    hidden, head = draft.project(batch.read[:, :count]), target.head[draft.words]
    cache: list[tuple[Tensor, Tensor]] = []
    for step in range(steps):
        embeds = F.embedding(ids[:, 1 + step : 1 + step + count], target.embed)
        hidden = draft.midlayer(embeds, hidden, step, cache)
        ahead = steps - 1 if whole else step
        mask = (place >= start - 1) & (place + 2 + ahead < end)
        rows = mask.flatten().nonzero()[:, 0].to(ids.device, non_blocking=True)
        at = rows // count * ids.shape[1] + rows % count + 1 + step  # in the batch's B * N: the token known last
        logits = draft.lm_head(draft.norm(hidden.flatten(0, 1)[rows])).float()
        with torch.no_grad():
            known = F.linear(batch.final.flatten(0, 1)[at], head).float()
            wanted = (known - batch.log_total.flatten()[at, None]).exp()
            token = ids.flatten()[(at + 1).clamp(max=ids.numel() - 1)]
        yield Step(rows, logits, wanted, token)


def loss_of(steps: Iterator[Step], fade: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy with the target's distribution, step k weighted ``fade**k``, and the chance of acceptance [steps].

    That is the target's probability of the draft's most likely token: what a chain drafted greedily is accepted by.
    """
    loss, accepted = torch.zeros(()), []
    for k, step in enumerate(steps):
        loss = loss - fade**k * (step.wanted * step.logits.log_softmax(-1)).sum(-1).mean()
        best = step.logits.argmax(-1, keepdim=True)
        accepted.append(step.wanted.gather(1, best).mean())
    return loss, torch.stack(accepted)


@torch.no_grad()
def chains(draft: Draft, target: Target, batch: Batch, steps: int) -> tuple[Tensor, Tensor]:
    """Of every place of the answers: whether the draft's first k + 1 tokens are the text's [M, steps] (bool), and the
    overlap of its distribution with the target's [M, steps], which rejection sampling accepts by."""
    hits, overlaps = [], []
    for step in unroll(draft, target, batch, steps, whole=True):
        hits.append(draft.words[step.logits.argmax(-1)] == step.token)
        overlaps.append(torch.minimum(step.logits.softmax(-1), step.wanted).sum(-1))
    return torch.stack(hits, 1).long().cumprod(1).bool(), torch.stack(overlaps, 1)


def draft_config(target: Target, vocabulary: int) -> dict:
    """config.json of the draft of ``target``."""
    same = [name for name in SHARED_FIELDS if name in target.config]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "bfloat16",
        **{name: target.config[name] for name in same},
        "head_dim": target.head_dim,
        "num_hidden_layers": 1,
        "rope_theta": target.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": target.theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "draft_vocab_size": vocabulary,
        "fc_norm": True,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": target.layer_ids},
    }


def save(draft: Draft, folder: Path) -> int:
    """Write config.json and model.safetensors (bfloat16, d2t and t2d beside), each whole or not at all; its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    words, size = draft.words.cpu(), draft.config["vocab_size"]
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in draft.state_dict().items()
    }
    known = torch.zeros(size, dtype=torch.bool)
    known[words] = True
    weights |= {"d2t": words - torch.arange(len(words)), "t2d": known}
    save_file(weights, folder / "model.part", metadata={"format": "pt"})
    (folder / "model.part").rename(folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(draft.config, indent=1) + "\n")
    return (folder / "model.safetensors").stat().st_size


def load(folder: Path) -> Draft:
    """The draft that :func:`save` wrote, in float32."""
    weights = load_file(folder / "model.safetensors")
    offsets = weights.pop("d2t")
    del weights["t2d"]
    draft = Draft(json.loads((folder / "config.json").read_text()), offsets + torch.arange(len(offsets)))
    draft.load_state_dict(weights)
    return draft
