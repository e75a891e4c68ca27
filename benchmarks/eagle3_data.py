"""Conversations for train_eagle3, all written by the target itself: no outside text is learned from.

All rows of a batch stand at the same position. The pieces of the chat template are forced, the rest is drawn: the
user's turn at temperature 1, half of the answers greedily and half at temperature 1. Rows that belong to given prompts
(for the evaluation only) have their whole first turn forced.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sglang_adaptive.benchmarks.eagle3_target import Decoder, Target, draw

LEAST_ANSWER = 10  # tokens; shorter answers are not kept
TRAIN, HELD_OUT = "train", "self"
# What half of the user's turns begin with, so that the subjects spread. The other half begins with nothing.
BEGINNINGS = (
    "Write a Python function to", "def ", "from typing import List\n\n\ndef ", "Complete the following code:\n",
    "What does this code do?\n", "Explain how", "Why", "What is the difference between", "How can I", "Tell me about",
    "Write a poem about", "Write a short story in which", "Draft an email to", "Summarize this paragraph: ",
    "A farmer has", "If a train", "Tom buys", "How many", "Solve for x:", "Compose a blog post about",
    "Suppose you are", "Translate into French: ", "Give three reasons", "List the steps", "Describe",
    "Correct the grammar: ", "Who",
)  # fmt: skip


@dataclass
class Chat:
    """Token ids of the chat template around the user's words."""

    before: list[int]
    after: list[int]
    encode: Callable[[str], list[int]]

    @classmethod
    def load(cls, folder: Path) -> Chat:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        mark = "@@words@@"
        turn = [{"role": "user", "content": mark}]
        before, after = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False).split(mark)

        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        return cls(encode(before), encode(after), encode)

    def beginnings(self) -> list[list[int]]:
        """How a conversation may begin: the template's first piece, and often some first words."""
        return [self.before + self.encode(text) for text in BEGINNINGS] + [self.before] * len(BEGINNINGS)


@dataclass
class Conversations:
    """``ids`` [N, L] (int32); the answer is ``ids[start:end]``, its end mark included; ``kind`` says what a row is for.

    ``start``, ``end`` (int64), ``greedy`` (bool) are on the CPU, so that batches are put together without waiting.
    """

    ids: Tensor
    start: Tensor
    end: Tensor
    greedy: Tensor
    kind: list[str]

    def __len__(self) -> int:
        return len(self.kind)

    def of_kind(self, kind: str) -> Tensor:
        """Indices of the rows of ``kind`` [n]."""
        return torch.tensor([i for i, found in enumerate(self.kind) if found == kind], dtype=torch.long)

    @staticmethod
    def join(parts: list[Conversations]) -> Conversations:
        tensors = (torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "start", "end", "greedy"))
        return Conversations(*tensors, kind=[kind for part in parts for kind in part.kind])


@dataclass
class Opening:
    """The forced first ids of a row; ``complete`` where they hold the user's whole turn."""

    ids: list[int]
    kind: str = TRAIN
    complete: bool = False


def given_prompts(file: Path | None, chat: Chat, longest: int) -> list[Opening]:
    """Openings from lines of ``{"source": ..., "text": ...}``, in the order of the file; longer ones are left out."""
    if file is None:
        return []
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    openings = [Opening(chat.before + chat.encode(row["text"]) + chat.after, row["source"], True) for row in rows]
    return [opening for opening in openings if len(opening.ids) <= longest]


@torch.no_grad()
def write_batch(
    decoder: Decoder, openings: list[Opening], after: list[int], user_room: int, over: Callable[[], bool]
) -> Conversations:
    """One conversation for each of ``openings``, as long as the decoder's rows at most, broken off when ``over``.

    The user's turn ends where the target ends it, or after ``user_room`` tokens.
    """
    target, batch, length = decoder.target, len(openings), decoder.length
    device = target.device
    forced = torch.full((batch, length + len(after) + 1), -1)
    for row, opening in zip(forced, openings, strict=True):
        row[: len(opening.ids)] = torch.tensor(opening.ids)
    forced, tail = forced.to(device), torch.tensor(after, device=device)
    sizes = torch.tensor([len(opening.ids) for opening in openings], device=device)
    answering = torch.tensor([opening.complete for opening in openings], device=device)
    done = torch.zeros_like(answering)
    start = torch.where(answering, sizes, length)
    end = torch.full_like(start, length)
    greedy = torch.arange(batch, device=device) % 2 == 0
    ids = torch.zeros(batch, length, dtype=torch.long, device=device)
    tokens = ids[:, 0] = forced[:, 0]
    for last in range(length - 1):
        here = last + 1  # the position that is filled now
        tokens = draw(decoder(tokens, last), torch.where(answering & greedy, 0.0, 1.0))
        free = forced[:, here] < 0
        tokens = torch.where(free, tokens, forced[:, here])
        close = free & ~answering & ((tokens == tail[0]) | (here >= sizes + user_room))
        tokens = torch.where(close, tail[0], tokens)
        rest = forced[:, here + 1 : here + len(after)]
        rest.copy_(torch.where(close[:, None], tail[1:], rest))
        start = torch.where(close, here + len(after), start)
        stop = free & answering & ~done & torch.isin(tokens, target.ends)
        end = torch.where(stop, here + 1, end)
        answering, done = answering | close, done | stop
        ids[:, here] = tokens
        if here % 64 == 0:
            decoder.say(f"data: {here} of {length} tokens of {batch} conversations")
        if here % 16 == 0 and (over() or bool(done.float().mean() > 0.97)):
            break
    end = end.clamp(max=here + 1).cpu()
    start = start.cpu()
    kept = (end - start >= LEAST_ANSWER).nonzero()[:, 0]
    kinds = [openings[i].kind for i in kept.tolist()]
    return Conversations(ids[kept.to(device)].int(), start[kept], end[kept], greedy.cpu()[kept], kinds)


def converse(
    target: Target,
    chat: Chat,
    given: list[Opening],
    *,
    sequences: int,
    held_out: int,
    batch: int,
    length: int,
    user_room: int,
    over: Callable[[], bool],
    say: Callable[[str], None],
) -> Conversations:
    """Conversations until there are ``sequences`` to train on or it is ``over``; one batch at least is begun.

    ``given`` and ``held_out`` more of the target's own are for the evaluation and come first.
    """
    rng, beginnings = random.Random(0), chat.beginnings()
    waiting = given[: batch // 2] + [Opening(rng.choice(beginnings), HELD_OUT) for _ in range(held_out)]
    decoder = Decoder(target, batch, length, say)
    parts: list[Conversations] = []
    while not parts or (sum(len(part.of_kind(TRAIN)) for part in parts) < sequences and not over()):
        waiting += [Opening(rng.choice(beginnings)) for _ in range(batch - len(waiting))]
        parts.append(write_batch(decoder, waiting[:batch], chat.after, user_room, over))
        waiting = waiting[batch:]
        answers = sum(int((part.end - part.start).sum()) for part in parts)
        say(f"data: {sum(map(len, parts))} conversations, {answers} answer tokens")
    return Conversations.join(parts)
