"""What train_eagle3 does: conversations, training, checkpoint and acceptance, each within its part of the time."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_adaptive.benchmarks import eagle3_draft
from sglang_adaptive.benchmarks.eagle3_data import TRAIN, Chat, Conversations, converse, given_prompts
from sglang_adaptive.benchmarks.eagle3_draft import Batch, Draft
from sglang_adaptive.benchmarks.eagle3_pack import pack
from sglang_adaptive.benchmarks.eagle3_target import Target
from sglang_adaptive.benchmarks.train_eagle3 import Budget
from sglang_adaptive.errors import AdaptiveError

FINISH_SHARE, FINISH_SECONDS = 0.08, 12.0  # of the time, kept for checkpoint and measurement: a share, and at most
SAVE_EVERY = 20.0  # seconds of training between checkpoints, should the process be killed


class Library:
    """Batches of conversations with what the target makes of them, which is kept on the device from their first use."""

    def __init__(self, target: Target, data: Conversations, steps: int, budget: Budget) -> None:
        self.target, self.data = target, data
        self.ids = torch.nn.functional.pad(data.ids.long(), (0, steps))
        rows, places = self.ids.shape
        self.filled = torch.zeros(rows, dtype=torch.bool)
        self.kept: tuple[Tensor, Tensor, Tensor] | None = None
        new = {"device": target.device, "dtype": target.dtype}
        try:
            self.kept = (
                torch.empty(rows, places, target.hidden, **new),
                torch.empty(rows, places, target.hidden * len(target.layer_ids), **new),
                torch.empty(rows, places, device=target.device),
            )
        except RuntimeError as error:  # out of memory, on either device
            budget.say(f"the target's states are computed anew in each step: {str(error).splitlines()[0]}")

    def _look(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        final, read = self.target.look(ids)
        return final, read, self.target.log_total(final.flatten(0, 1)).view(ids.shape)

    @torch.no_grad()
    def batch(self, rows: Tensor, steps: int) -> Batch:
        """Of ``rows`` [B] (on the CPU), as long as the longest answer needs."""
        at = rows.to(self.ids.device)
        answers = torch.stack([self.data.start[rows], self.data.end[rows]])
        # Rows of the draft in multiples of 32 where there are as many: matrix products of odd widths are slow.
        width = min(self.ids.shape[1], -(-int(answers[1].max()) // 32) * 32 + steps)
        ids = self.ids[at, :width]
        if self.kept is None:
            return Batch(ids, *self._look(ids), answers)
        if not bool(self.filled[rows].all()):
            for store, found in zip(self.kept, self._look(ids), strict=True):
                store[at, :width] = found.to(store.dtype)
            self.filled[rows] = True
        return Batch(ids, *(store[at, :width] for store in self.kept), answers)


def _shuffled(rows: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = min(size, len(rows))
    while True:
        yield from (
            part for part in rows[torch.randperm(len(rows), generator=generator)].split(size) if len(part) == size
        )


def autocast(target: Target) -> torch.autocast:
    """Mixed precision where the target is in bfloat16."""
    return torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16)


def train(draft: Draft, library: Library, rows: Tensor, args: argparse.Namespace, budget: Budget, until: float) -> list:
    """AdamW until the time ``until``; the cosine of the rate follows the clock. Returns the lines of progress."""
    target, curve = library.target, []
    optimiser = torch.optim.AdamW(
        draft.parameters(), args.rate, (0.9, 0.95), weight_decay=0.0, fused=target.device.type == "cuda" or None
    )
    begin = said = saved = time.monotonic()
    size, highest, step, since = args.batch, args.rate, 0, 0
    good = {name: value.clone() for name, value in draft.state_dict().items()}
    sums = torch.zeros(1 + args.steps, device=target.device)
    batches = _shuffled(rows, size, args.seed)
    while len(rows) and step < args.max_steps and not budget.over(until):
        now = time.monotonic()
        done = max((now - begin) / max(1e-9, until - begin), step / args.max_steps)
        rise = min(1.0, (step + 1) / args.warmup)
        optimiser.param_groups[0]["lr"] = highest * rise * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, done))))
        try:
            with autocast(target):
                batch = library.batch(next(batches), args.steps)
                loss, accepted = eagle3_draft.loss_of(eagle3_draft.unroll(draft, target, batch, args.steps), args.fade)
            loss.backward()
        except torch.OutOfMemoryError:
            size //= 2
            if size == 0:
                raise
            budget.say(f"out of memory: {size} conversations in a step from here on")
            loss = accepted = batch = None
            optimiser.zero_grad()
            torch.cuda.empty_cache()
            batches = _shuffled(rows, size, args.seed + 1)
            continue
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        sums += torch.cat([loss.detach()[None], accepted])
        step, since = step + 1, since + 1
        if step == 1 or time.monotonic() - said >= args.every or step == args.max_steps:
            loss_now, *shares = (sums / since).tolist()
            said, passed = time.monotonic(), time.monotonic() - said
            if math.isfinite(loss_now):
                good = {name: value.clone() for name, value in draft.state_dict().items()}
                if said - saved > SAVE_EVERY:
                    saved = said
                    eagle3_draft.save(draft, args.out)
            else:
                draft.load_state_dict(good)
                optimiser.state.clear()
                highest /= 2
            line = {"step": step, "seconds": round(said - begin, 1), "loss": round(loss_now, 4)}
            curve.append(line | {"accepted": [round(share, 4) for share in shares]})
            budget.say(
                f"step {step}: loss {loss_now:.3f}, accepted {' '.join(f'{share:.3f}' for share in shares)}, "
                f"rate {optimiser.param_groups[0]['lr']:.1e}, {since / max(1e-9, passed):.1f} steps/s"
            )
            sums.zero_()
            since = 0
    if since and not bool(sums.isfinite().all()):
        draft.load_state_dict(good)
    return curve


def measure(draft: Draft, library: Library, steps: int, size: int, budget: Budget) -> dict[str, Any]:
    """Acceptance on all rows that were not trained on, by their kind and how the answer was drawn.

    ``survival`` [steps] is the share of places whose first k + 1 draft tokens were the text's, ``conditional`` that of
    those which the k before them reached, ``overlap`` the mean of sum(min(p, q)), ``length`` the tokens of a step that
    follow: 1 + the sum of survival. At temperature 1 the text is a draw of the target's, so that is the acceptance of a
    chain that is drafted greedily and verified by target-only sampling.
    """
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(name for name in library.data.kind if name != TRAIN):
        for greedy in (True, False):
            rows = library.data.of_kind(kind)
            rows = rows[library.data.greedy[rows] == greedy]
            parts = []
            for part in rows.split(size):
                if budget.over():
                    break
                with autocast(library.target):
                    parts.append(eagle3_draft.chains(draft, library.target, library.batch(part, steps), steps))
            alive, overlap = (
                (torch.cat(each).float() for each in zip(*parts, strict=True)) if parts else [torch.zeros(0)] * 2
            )
            if not len(alive):
                continue
            survival = alive.mean(0).tolist()
            before = [1.0, *survival[:-1]]
            found.setdefault(kind, {})["greedy" if greedy else "temperature 1"] = {
                "places": len(alive),
                "survival": [round(x, 4) for x in survival],
                "conditional": [round(x / y, 4) if y else None for x, y in zip(survival, before, strict=True)],
                "overlap": [round(x, 4) for x in overlap.mean(0).tolist()],
                "length": round(1 + sum(survival), 4),
            }
    return found


def vocabulary(data: Conversations, size: int, target: Target) -> Tensor:
    """The ``size`` most frequent tokens of the answers trained on [size], ascending, and what ends an answer."""
    places = torch.arange(data.ids.shape[1])
    rows = data.of_kind(TRAIN)
    answer = (places >= data.start[rows, None]) & (places < data.end[rows, None])
    counts = torch.bincount(data.ids.cpu()[rows][answer].long(), minlength=target.vocab)
    counts[target.ends.cpu()] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[: min(size, target.vocab)].sort().values.to(target.device)


def _conversations(target: Target, chat: Chat, args: argparse.Namespace, budget: Budget, until: float) -> Conversations:
    given = given_prompts(args.prompts, chat, args.length - min(128, args.length // 4))
    batch = args.gen_batch
    while True:
        try:
            return converse(
                target, chat, given, sequences=args.sequences, held_out=args.held_out, batch=batch, length=args.length,
                user_room=args.user_room, over=lambda: budget.over(until), say=budget.say,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            batch //= 2
            if not batch:
                raise
        budget.say(f"out of memory: {batch} conversations at a time from here on")
        torch.cuda.empty_cache()


def run(args: argparse.Namespace, budget: Budget) -> dict[str, Any]:
    """The whole way; returns what METRICS.json says."""
    torch.manual_seed(args.seed)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its attention fails where cuDNN is older than torch expects
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    layers = json.loads((args.target / "config.json").read_text())["num_hidden_layers"]
    layer_ids = sorted(args.layer_ids or {min(1, layers - 2), (layers - 1) // 2, layers - 2})
    if len(set(layer_ids)) < 2 or not 0 <= layer_ids[0] <= layer_ids[-1] <= layers - 2:
        raise AdaptiveError(f"--layer-ids needs two or more of the layers 0 to {layers - 2}, but it is {layer_ids}.")
    target = Target.load(args.target, layer_ids, device, dtype)
    chat = Chat.load(args.target)
    budget.say(f"target of {layers} layers on {device} in {dtype}, the draft reads layers {layer_ids}")

    data = _conversations(target, chat, args, budget, budget.share(args.data_share))
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    rows, words = data.of_kind(TRAIN), vocabulary(data, args.draft_vocab, target)
    answers = (data.end - data.start)[rows].float()
    budget.say(f"{len(rows)} conversations to train on, {int(answers.sum())} answer tokens")
    template = torch.tensor([chat.before + chat.after], device=target.device)
    config = eagle3_draft.draft_config(target, len(words))
    draft = Draft(config, words).to(device).begin_from(target, target.look(template)[1][0])
    library = Library(target, data, args.steps, budget)
    left = budget.end - time.monotonic()
    until = budget.end - min(FINISH_SECONDS, FINISH_SHARE * 60 * args.minutes, left / 2)
    curve = train(draft, library, rows, args, budget, until)

    size = eagle3_draft.save(draft, args.out)
    budget.say(f"checkpoint of {size / 2**20:.1f} MiB in {args.out}")
    metrics: dict[str, Any] = {
        "arguments": {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()},
        "conversations": len(rows),
        "answer_tokens": int(answers.sum()),
        "training": curve,
        "checkpoint_bytes": size,
    }
    args.out.joinpath("METRICS.json").write_text(json.dumps(metrics, indent=1) + "\n")
    served = eagle3_draft.load(args.out).to(device)
    metrics["acceptance"] = measure(served, library, args.steps, args.batch, budget)
    try:
        metrics["gguf_bytes"] = pack(args.out, args.out / "draft.gguf")
        budget.say(f"{metrics['gguf_bytes'] / 1e6:.1f} MB as draft.gguf")
    except ImportError:
        budget.say("no draft.gguf: the package gguf is missing; benchmarks/eagle3_pack.py makes it from the checkpoint")
    metrics["seconds"] = round(time.monotonic() - budget.begin, 1)
    args.out.joinpath("METRICS.json").write_text(json.dumps(metrics, indent=1) + "\n")
    for kind, each in metrics["acceptance"].items():
        for how, found in each.items():
            by_place = " ".join(f"{share:.3f}" for share in found["conditional"] if share is not None)
            budget.say(f"{kind}, {how}: {found['length']:.3f} tokens a step, accepted by position {by_place}")
    budget.say("done")
    return metrics
