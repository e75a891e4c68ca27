"""A target and a DSpark draft that train in under a minute on two cores, for tests that need many decode steps.

Usage: ``python tests/tiny_pair.py CACHE_DIR`` trains the pair, or finds it there, and prints the folders.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path

import tiny_draft
import tiny_language as language
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_draft import CAPTURED, DRAFT_CONFIG, GAMMA, HIDDEN, MARKOV_RANK, TARGET_CONFIG, Draft
from torch import nn

LENGTH, BATCH, ANCHORS = 96, 16, 12
TARGET_STEPS, DRAFT_STEPS = 280, 200


# ---------------------------------------------------------------------------------------------------------- training
def _say(begin: float, text: str) -> None:
    print(f"[{time.monotonic() - begin:5.1f} s] tiny pair: {text}", file=sys.stderr, flush=True)


def _optimiser(model: nn.Module, steps: int, rate: float):
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    shape = lambda step: min(1.0, (step + 1) / 20) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))  # noqa: E731
    return optimiser, torch.optim.lr_scheduler.LambdaLR(optimiser, shape)


def _step(loss, model, optimiser, schedule) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    schedule.step()
    optimiser.zero_grad(set_to_none=True)


def _batch(rng: random.Random) -> torch.Tensor:
    return torch.tensor([language.training_text(rng, LENGTH) for _ in range(BATCH)])


def _train_target(begin: float):
    from transformers import LlamaConfig, LlamaForCausalLM

    target = LlamaForCausalLM(LlamaConfig(**TARGET_CONFIG)).float().train()
    optimiser, schedule = _optimiser(target, TARGET_STEPS, 4e-3)
    rng = random.Random(1)
    for step in range(TARGET_STEPS):
        ids = _batch(rng)
        logits = target(ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        _step(loss, target, optimiser, schedule)
        if step % 60 == 59:
            _say(begin, f"target step {step + 1} of {TARGET_STEPS}, loss {loss.item():.3f}")
    return target.eval().requires_grad_(False)


def _look(target, ids):
    """The target's logits [B, N, VOCAB] and captured layer outputs [B, N, captured layers * HIDDEN]."""
    output = target(ids, output_hidden_states=True, use_cache=False)
    return output.logits, torch.cat([output.hidden_states[layer + 1] for layer in CAPTURED], dim=-1)


def _draft_loss(draft: Draft, target, ids: torch.Tensor):
    """The paper's loss (eqs. 9 to 11) with teacher forcing, and the mean chance of acceptance of each block row."""
    with torch.no_grad():
        logits, captured = _look(target, ids)
    batch = torch.arange(BATCH)[:, None, None]
    anchors = torch.randint(1, LENGTH - GAMMA, (BATCH, ANCHORS))
    places = anchors[..., None] + torch.arange(GAMMA)
    previous, label = ids[batch, places], ids[batch, places + 1]
    blocks = previous.clone()
    blocks[..., 1:] = language.MASK
    hidden = draft(blocks, captured, anchors, target.model.embed_tokens)
    guess = target.lm_head(hidden) + draft.bias(previous)
    distance = (guess.softmax(-1) - logits[batch, places].softmax(-1)).abs().sum(-1)
    cross_entropy = F.cross_entropy(guess.flatten(0, 2), label.flatten(), reduction="none").view_as(distance)
    accepted = 1 - distance.detach() / 2
    confidence = F.binary_cross_entropy_with_logits(draft.confidence(hidden, previous), accepted, reduction="none")
    weight = torch.exp(-torch.arange(GAMMA) / 4)
    loss = ((0.1 * cross_entropy + 0.9 * distance + confidence) * weight).sum(-1).mean() / weight.sum()
    return loss, accepted.mean((0, 1))


def _train_draft(target, begin: float) -> Draft:
    draft = Draft()
    optimiser, schedule = _optimiser(draft, DRAFT_STEPS, 4e-3)
    rng = random.Random(2)
    for step in range(DRAFT_STEPS):
        loss, accepted = _draft_loss(draft, target, _batch(rng))
        _step(loss, draft, optimiser, schedule)
        if step % 60 == 59:
            shares = " ".join(f"{share:.2f}" for share in accepted.tolist())
            _say(begin, f"draft step {step + 1} of {DRAFT_STEPS}, loss {loss.item():.3f}, accepted {shares}")
    return draft.eval().requires_grad_(False)


# --------------------------------------------------------------------------------------------------------- reference
@torch.no_grad()
def accepted_length(target, draft: Draft, prompt: list[int], tokens: int = 48) -> tuple[float, float]:
    """Greedy speculative decoding in plain torch: tokens a step, the target's own included, and mean survival.

    Survival is what the confidence head expects: the number of accepted draft tokens a step.
    """
    ids, steps, expected = list(prompt), 0, 0.0
    ids.append(int(_look(target, torch.tensor([ids]))[0][0, -1].argmax()))
    while len(ids) < len(prompt) + 1 + tokens:
        anchor = len(ids) - 1
        captured = _look(target, torch.tensor([ids[:anchor]]))[1]
        block = torch.full((1, 1, GAMMA), language.MASK)
        block[0, 0, 0] = ids[anchor]
        hidden = draft(block, captured, torch.tensor([[anchor]]), target.model.embed_tokens)[0, 0]
        base, chain = target.lm_head(hidden), [ids[anchor]]
        for row in range(GAMMA):
            chain.append(int((base[row] + draft.bias(torch.tensor(chain[-1]))).argmax()))
        confidence = draft.confidence(hidden, torch.tensor(chain[:-1])).sigmoid()
        expected += float(confidence.cumprod(0).sum())
        best = _look(target, torch.tensor([ids[:anchor] + chain]))[0][0, anchor:].argmax(-1).tolist()
        agreed = next((i for i in range(GAMMA) if chain[i + 1] != best[i]), GAMMA)
        ids += best[: agreed + 1]
        steps += 1
    return (len(ids) - len(prompt) - 1) / steps, expected / steps


def _check(target, draft: Draft, begin: float) -> None:
    """Assert that the draft helps on easy text, less on hard text, and that the confidence head knows it."""
    found = {}
    for name, kind in (("easy", language.EASY), ("hard", language.HARD)):
        prompts = language.random_prompts(6, 11, (kind,))
        ids = [[language.WORDS.index(word) for word in prompt.split()] for prompt in prompts]
        lengths, expected = zip(*(accepted_length(target, draft, prompt) for prompt in ids), strict=True)
        found[name] = sum(lengths) / len(lengths), sum(expected) / len(expected)
        _say(begin, f"{name} text: {found[name][0]:.2f} tokens a step, confidence expects {1 + found[name][1]:.2f}")
    assert found["easy"][0] > 1.8, "the draft does not foresee easy text"
    assert found["easy"][0] > found["hard"][0] + 1, "hard text is not harder"
    assert found["easy"][1] > found["hard"][1] + 1, "the confidence head does not tell easy from hard text"


# --------------------------------------------------------------------------------------------------------- checkpoints
def _save(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _make(folder: Path) -> None:
    begin = time.monotonic()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # layers this small lose more by a second thread than they gain
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            target = _train_target(begin)
            draft = _train_draft(target, begin)
        _check(target, draft, begin)
    finally:
        torch.set_num_threads(threads)
    _save(folder / "target", TARGET_CONFIG, target.state_dict())
    language.save_tokenizer(folder / "target")
    _save(folder / "draft", DRAFT_CONFIG, draft.state_dict())


def tiny_pair(cache_dir: Path) -> tuple[Path, Path]:
    """Folders of target and draft, float32 Hugging Face checkpoints; trained once for each state of these scripts."""
    sources = (Path(__file__), Path(tiny_draft.__file__), Path(language.__file__))
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    folder = cache_dir / f"tiny-pair-{key}"
    cache_dir.mkdir(parents=True, exist_ok=True)
    with open(cache_dir / f".tiny-pair-{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache_dir) as temporary:
                _make(Path(temporary) / "pair")
                (Path(temporary) / "pair").rename(folder)
    return folder / "target", folder / "draft"


def faulty_draft(draft: Path, fault: str, folder: Path) -> Path:
    """A copy of ``draft`` in ``folder`` that must be refused.

    ``fault`` is ``no_confidence_head`` (the configuration says so and the weights are gone), ``other_vocabulary`` or
    ``other_hidden_size`` (configuration and weights of another target; the values do not matter).
    """
    config = json.loads((draft / "config.json").read_text())
    weights = load_file(draft / "model.safetensors")
    if fault == "no_confidence_head":
        config["enable_confidence_head"] = False
        weights = {name: value for name, value in weights.items() if not name.startswith("confidence_head.")}
    elif fault == "other_vocabulary":
        config["vocab_size"] = language.VOCAB + 64
        weights = _resized(weights, language.VOCAB, language.VOCAB + 64)
    elif fault == "other_hidden_size":
        config["hidden_size"] = HIDDEN + 32
        weights = _resized(weights, HIDDEN, HIDDEN + 32)
        shape = (HIDDEN + 32, len(CAPTURED) * (HIDDEN + 32))
        weights["fc.weight"] = torch.zeros(shape)
        weights["confidence_head.proj.weight"] = torch.zeros(1, HIDDEN + 32 + MARKOV_RANK)
    else:
        raise ValueError(f"no fault is called {fault}")
    _save(folder, config, weights)
    return folder


def _resized(weights: dict[str, torch.Tensor], old: int, new: int) -> dict[str, torch.Tensor]:
    """Every dimension of size ``old`` becomes ``new``; the values of a tensor that changes are zero."""
    shapes = {name: [new if size == old else size for size in value.shape] for name, value in weights.items()}
    return {
        name: value if list(value.shape) == shapes[name] else torch.zeros(shapes[name])
        for name, value in weights.items()
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(*tiny_pair(Path(sys.argv[1])), sep="\n")
