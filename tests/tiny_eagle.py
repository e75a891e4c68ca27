"""Drafts of the EAGLE kind for the tiny target: EAGLE, EAGLE3, and the same target with one MTP layer of its own.

Usage: ``python tests/tiny_eagle.py CACHE_DIR`` trains them, or finds them there, and prints the folders.

All follow SGLang's layout. Row ``t`` of a draft knows token ``t + 1`` and a hidden state: the target's of position
``t`` or, on later steps of a draft, the draft's own of the step before. It predicts token ``t + 2``.
"""

from __future__ import annotations

import fcntl
import hashlib
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tiny_draft
import tiny_language as language
import tiny_pair as pair
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_draft import EPS, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MLP, SHARED_CONFIG, TARGET_CONFIG
from tiny_pair import LENGTH
from torch import nn

UNROLL, FADE = 4, 0.9  # draft steps trained on end, and the weight of each against the one before
BATCH, EAGLE3_STEPS, MTP_STEPS, EAGLE_STEPS = 8, 110, 50, 80
# An EAGLE3 draft has a vocabulary of its own; it lacks the rare words, here those that no text needs.
DRAFT_WORDS = [word for word in range(language.VOCAB) if word not in (language.UNK, language.BOS, language.MASK)]
EAGLE3_CONFIG = {
    **SHARED_CONFIG,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": len(DRAFT_WORDS),
}
EAGLE_CONFIG = {
    **SHARED_CONFIG,
    "architectures": ["LlamaForCausalLMEagle"],
    "model_type": "llama",
    "num_hidden_layers": 1,
}
MTP_TARGET_CONFIG = {
    **TARGET_CONFIG,
    "architectures": ["MiMoForCausalLM"],
    "num_nextn_predict_layers": 1,
}


# -------------------------------------------------------------------------------------------------------------- drafts
class Block(nn.Module):
    """One decoder layer over rows of ``width`` features, unrolled over the steps of a draft."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        linear = lambda inputs, outputs, bias=False: nn.Linear(inputs, outputs, bias=bias)  # noqa: E731
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(width, HEADS * HEAD_DIM, bias),
                "k_proj": linear(width, KV_HEADS * HEAD_DIM, bias),
                "v_proj": linear(width, KV_HEADS * HEAD_DIM, bias),
                "o_proj": linear(HEADS * HEAD_DIM, HIDDEN),
            }
        )
        self.mlp = nn.ModuleDict(
            {"gate_proj": linear(HIDDEN, MLP), "up_proj": linear(HIDDEN, MLP), "down_proj": linear(MLP, HIDDEN)}
        )
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)

    def forward(self, rows, residual, step: int, cache: list):
        """Rows [B, N, width] of draft step ``step``, each at its position + ``step``; [B, N, HIDDEN].

        ``cache`` holds the keys and values of the steps before. A row sees the rows of step 0 up to its own place, and
        of later steps only those of its own chain.
        """
        split = lambda x: x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)  # noqa: E731
        positions = (torch.arange(rows.shape[1]) + step).expand(rows.shape[0], -1)
        wide = lambda x: x.repeat_interleave(HEADS // KV_HEADS, 1)  # noqa: E731
        query = tiny_draft._rotate(split(self.self_attn["q_proj"](rows)), positions)
        key = wide(tiny_draft._rotate(split(self.self_attn["k_proj"](rows)), positions))
        cache.append((key, wide(split(self.self_attn["v_proj"](rows)))))
        scale = HEAD_DIM**-0.5
        causal = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool).tril()
        scores = [(query @ cache[0][0].transpose(-1, -2) * scale).masked_fill(~causal, float("-inf"))]
        scores += [(query * key).sum(-1, keepdim=True) * scale for key, _ in cache[1:]]
        weights = torch.cat(scores, -1).softmax(-1)
        mixed = weights[..., : rows.shape[1]] @ cache[0][1]
        for i, (_, value) in enumerate(cache[1:]):
            mixed = mixed + weights[..., rows.shape[1] + i, None] * value
        residual = residual + self.self_attn["o_proj"](mixed.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(residual)
        return residual + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed))


class Eagle3(nn.Module):
    """Parameters are named as EAGLE3 checkpoints name them; the embedding is the target's."""

    words = torch.tensor(DRAFT_WORDS)

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        self.midlayer = Block(2 * HIDDEN, bias=False)
        self.midlayer.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.midlayer.hidden_norm = nn.RMSNorm(HIDDEN, EPS)
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        self.lm_head = nn.Linear(HIDDEN, len(DRAFT_WORDS), bias=False)

    def forward(self, embeds, hidden, step: int, cache: list):
        """Logits over ``words`` and the hidden state for the next step, both of each row."""
        if hidden.shape[-1] != HIDDEN:
            hidden = self.fc(hidden)
        layer = self.midlayer
        rows = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)
        out = layer(rows, hidden, step, cache)
        return self.lm_head(self.norm(out)), out


class Mtp(nn.Module):
    """Parameters are named as in ``model.mtp_layers.0`` of MiMo checkpoints; embedding and head are the target's."""

    words = torch.arange(language.VOCAB)

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.token_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.hidden_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.input_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.block = Block(HIDDEN, bias=True)
        self.final_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self._head = [head]  # in a list: no parameter of this module

    def forward(self, embeds, hidden, step: int, cache: list):
        if step == 0:
            embeds = torch.cat([torch.zeros_like(embeds[:, :1]), embeds[:, 1:]], dim=1)  # as the host: none at place 0
        both = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embeds)], dim=-1)
        residual = self.input_proj(both)
        out = self.final_layernorm(self.block(self.input_layernorm(residual), residual, step, cache))
        return self._head[0](out), out


class Eagle(nn.Module):
    """Parameters are named as EAGLE checkpoints name them; embedding and head are the target's.

    Its layer has no norm before attention, and the head reads the layer's output as it is: the draft's hidden states
    stand for the target's normed ones.
    """

    words = torch.arange(language.VOCAB)

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN)
        self.layers = nn.ModuleList([Block(HIDDEN, bias=False)])
        self._head = [head]  # in a list: no parameter of this module

    def forward(self, embeds, hidden, step: int, cache: list):
        rows = self.fc(torch.cat([embeds, hidden], dim=-1))
        out = self.layers[0](rows, rows, step, cache)
        return self._head[0](out), out


# ------------------------------------------------------------------------------------------------------------ training
@torch.no_grad()
def _look(target, ids):
    """The target's logits [B, N, VOCAB], and what each draft reads of it: EAGLE3's layers, and the last one normed."""
    output = target.model(ids, output_hidden_states=True, use_cache=False)
    layers = output.hidden_states[: len(target.model.layers)]  # what enters each layer: SGLang's default for EAGLE3
    return target.lm_head(output.last_hidden_state), torch.cat(layers, dim=-1), output.last_hidden_state


def _loss(draft: nn.Module, target, ids: torch.Tensor, read: int):
    """Cross-entropy with the target's distribution over the steps of a draft, and each step's chance of acceptance."""
    logits, *states = _look(target, ids)
    hidden, cache, loss, accepted = states[read], [], 0.0, []
    rows = LENGTH - 1 - UNROLL
    for step in range(UNROLL):
        if step == 0:
            hidden = hidden[:, :rows]
        embeds = target.model.embed_tokens(ids[:, 1 + step : 1 + step + rows])
        guess, hidden = draft(embeds, hidden, step, cache)
        wanted = logits[:, 1 + step : 1 + step + rows].softmax(-1)
        known = wanted[..., draft.words]
        loss = loss - FADE**step * (known * guess.log_softmax(-1)).sum(-1).mean()
        accepted.append(torch.minimum(known, guess.detach().softmax(-1)).sum(-1).mean())
    return loss, torch.stack(accepted)


def _train(draft: nn.Module, target, read: int, steps: int, seed: int, begin: float, name: str) -> nn.Module:
    optimiser, schedule = pair._optimiser(draft, steps, 4e-3)
    rng = random.Random(seed)
    for step in range(steps):
        loss, accepted = _loss(draft, target, pair._batch(rng)[:BATCH], read)
        pair._step(loss, draft, optimiser, schedule)
        if step % 60 == 59 or step == steps - 1:
            shares = " ".join(f"{share:.2f}" for share in accepted.tolist())
            pair._say(begin, f"{name} step {step + 1} of {steps}, loss {loss.item():.3f}, accepted {shares}")
    return draft.eval().requires_grad_(False)


# ----------------------------------------------------------------------------------------------------------- reference
@torch.no_grad()
def accepted_length(target, draft: nn.Module, read: int, prompt: list[int], steps: int, tokens: int = 48) -> float:
    """Tokens a step of greedy speculative decoding in plain torch, the target's own included."""
    ids, rounds = list(prompt), 0
    ids.append(int(_look(target, torch.tensor([ids]))[0][0, -1].argmax()))
    while len(ids) < len(prompt) + 1 + tokens:
        known = len(ids) - 1  # positions that the target has seen; the last token it has not
        hidden = _look(target, torch.tensor([ids[:known]]))[1 + read]
        chain, cache, words = [], [], torch.tensor([ids[1:]])
        for step in range(steps):
            guess, hidden = draft(target.model.embed_tokens(words), hidden, step, cache)
            chain.append(int(draft.words[guess[0, -1].argmax()]))
            # Only the last row of a step goes on; the others keep the places of the step before.
            words = torch.cat([words[:, 1:], torch.tensor([chain[-1:]])], dim=1)
        best = _look(target, torch.tensor([ids + chain]))[0][0, known:].argmax(-1).tolist()
        agreed = next((i for i in range(steps) if chain[i] != best[i]), steps)
        ids += best[: agreed + 1]
        rounds += 1
    return (len(ids) - len(prompt) - 1) / rounds


def _check(target, draft: nn.Module, read: int, begin: float, name: str) -> None:
    """Assert that the draft helps on easy text, and less on hard text."""
    found = {}
    for kind in (language.EASY, language.HARD):
        prompts = language.random_prompts(4, 11, (kind,))
        ids = [[language.WORDS.index(word) for word in prompt.split()] for prompt in prompts]
        found[kind] = sum(accepted_length(target, draft, read, prompt, 5) for prompt in ids) / len(ids)
    pair._say(
        begin, f"{name}: {found[language.EASY]:.2f} tokens a step on easy text, {found[language.HARD]:.2f} on hard"
    )
    assert found[language.EASY] > 2.0, "the draft does not foresee easy text"
    assert found[language.EASY] > found[language.HARD] + 0.8, "hard text is not harder"


# --------------------------------------------------------------------------------------------------------- checkpoints
def _load_target(folder: Path):
    from transformers import LlamaConfig, LlamaForCausalLM

    target = LlamaForCausalLM(LlamaConfig(**TARGET_CONFIG)).float()
    target.load_state_dict(load_file(folder / "model.safetensors"))
    return target.eval().requires_grad_(False)


def _make_eagle3(folder: Path, target_folder: Path) -> None:
    begin, target = time.monotonic(), _load_target(target_folder)
    draft = _train(Eagle3(), target, 0, EAGLE3_STEPS, 3, begin, "EAGLE3 draft")
    _check(target, draft, 0, begin, "EAGLE3 draft")
    offsets = draft.words - torch.arange(len(DRAFT_WORDS))
    known = torch.zeros(language.VOCAB, dtype=torch.bool)
    known[draft.words] = True
    pair._save(folder, EAGLE3_CONFIG, {**draft.state_dict(), "d2t": offsets, "t2d": known})


def _make_eagle(folder: Path, target_folder: Path) -> None:
    begin, target = time.monotonic(), _load_target(target_folder)
    draft = _train(Eagle(target.lm_head), target, 1, EAGLE_STEPS, 5, begin, "EAGLE draft")
    _check(target, draft, 1, begin, "EAGLE draft")
    pair._save(folder, EAGLE_CONFIG, draft.state_dict())


def _make_mtp(folder: Path, target_folder: Path) -> None:
    begin, target = time.monotonic(), _load_target(target_folder)
    draft = _train(Mtp(target.lm_head), target, 1, MTP_STEPS, 4, begin, "MTP layer")
    _check(target, draft, 1, begin, "MTP layer")
    weights = target.state_dict()
    for layer in range(len(target.model.layers)):  # this architecture has biases, Llama has none
        for name, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.zeros(size * HEAD_DIM)
    for name, value in draft.state_dict().items():
        weights[f"model.mtp_layers.0.{name.removeprefix('block.')}"] = value
    pair._save(folder, MTP_TARGET_CONFIG, weights)
    language.save_tokenizer(folder)


def _cached(cache_dir: Path, name: str, make: Callable[[Path, Path], None]) -> Path:
    target, _ = pair.tiny_pair(cache_dir)
    sources = (Path(__file__), Path(pair.__file__), Path(tiny_draft.__file__), Path(language.__file__))
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    folder = cache_dir / f"{name}-{key}"
    with open(cache_dir / f".{name}-{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # layers this small lose more by a second thread than they gain
            try:
                with torch.random.fork_rng(), tempfile.TemporaryDirectory(dir=cache_dir) as temporary:
                    torch.manual_seed(0)
                    make(Path(temporary) / name, target)
                    (Path(temporary) / name).rename(folder)
            finally:
                torch.set_num_threads(threads)
    return folder


def tiny_eagle3_pair(cache_dir: Path) -> tuple[Path, Path]:
    """Folders of the tiny target and its EAGLE3 draft; trained once for each state of these scripts."""
    return pair.tiny_pair(cache_dir)[0], _cached(cache_dir, "tiny-eagle3", _make_eagle3)


def tiny_eagle_pair(cache_dir: Path) -> tuple[Path, Path]:
    """Folders of the tiny target and its EAGLE draft; trained once for each state of these scripts."""
    return pair.tiny_pair(cache_dir)[0], _cached(cache_dir, "tiny-eagle", _make_eagle)


def tiny_mtp_target(cache_dir: Path) -> Path:
    """Folder of a target that says what the tiny one says, and carries an MTP layer."""
    return _cached(cache_dir, "tiny-mtp", _make_mtp)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    cache = Path(sys.argv[1])
    print(*tiny_eagle3_pair(cache), tiny_eagle_pair(cache)[1], tiny_mtp_target(cache), sep="\n")
