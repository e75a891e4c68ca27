"""What the quickstart measures, and how it judges and shows it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TIE_NATS = {"float32": 1e-3}
HALF_PRECISION_TIE_NATS = 0.25  # two steps of a bfloat16 logit between 16 and 32


@dataclass(frozen=True)
class Answers:
    """The answers of one server to all questions asked together.

    Attributes:
        texts: in the order of the questions.
        tokens: generated, in all.
        seconds: from the first request to the last answer.
    """

    texts: tuple[str, ...]
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Verdict:
    """Whether a text is the reference's: ``same``, or apart only by a rounding ``tie``, or neither; and why."""

    same: bool
    tie: bool
    why: str


def answers_of(replies: Sequence[dict[str, Any]], seconds: float) -> Answers:
    """From replies of ``/v1/chat/completions``."""
    texts = tuple(reply["choices"][0]["message"]["content"] or "" for reply in replies)
    return Answers(texts, sum(reply["usage"]["completion_tokens"] for reply in replies), seconds)


def judge(text: str, reference: str, steps: Sequence[dict[str, Any]], tie_nats: float) -> Verdict:
    """Compare a greedy text with the reference's.

    ``steps`` are the reference's tokens with their most likely alternatives, as ``logprobs`` of a chat reply lists
    them. Where the texts part, the other token is a tie if the reference gave it a log-probability within ``tie_nats``
    of its own choice: a forward over another number of rows rounds differently, and greedy choice follows the rounding.
    """
    if text == reference:
        return Verdict(True, False, "identical")
    said, prefix = text.encode(), b""
    for number, step in enumerate(steps, 1):
        grown = prefix + bytes(step["bytes"] or b"")
        if said.startswith(grown) and len(grown) > len(prefix):
            prefix = grown
            continue
        rivals = [rival for rival in step["top_logprobs"] if rival["token"] != step["token"]]
        matching = [rival for rival in rivals if rival["bytes"] and said.startswith(prefix + bytes(rival["bytes"]))]
        gap = min((step["logprob"] - rival["logprob"] for rival in matching), default=float("inf"))
        if gap <= tie_nats:
            return Verdict(False, True, f"parts at token {number}, a rounding tie ({gap:.3f} nats)")
        return Verdict(False, False, f"differs at token {number}, {gap:.3f} nats from the choice without speculation")
    return Verdict(False, False, f"goes on after the {len(steps)} tokens without speculation")


def since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The change of every counter: numbers and lists of numbers. What is no number before and after is left out."""
    change: dict[str, Any] = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, list) and isinstance(old, list) and len(value) == len(old):
            if all(isinstance(each, int | float) for each in [*value, *old]):
                change[name] = [new - was for new, was in zip(value, old, strict=True)]
        elif isinstance(value, dict) and isinstance(old, dict):
            change[name] = since(old, value)
        elif isinstance(value, int | float) and isinstance(old, int | float) and not isinstance(value, bool):
            change[name] = value - old
    return change


def table(plain: Answers, adaptive: Answers, counters: dict[str, Any]) -> str:
    """The comparison for people. ``counters`` are those of the worker, of the measured answers only."""
    steps, rows = counters["steps"], counters["requests"]
    positions = zip(counters["accepted_per_position"], counters["verified_per_position"], strict=True)
    accepted = " ".join(f"{hit / seen:.2f}" if seen else "  - " for hit, seen in positions)
    decisions = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counters["decisions"].items() if count)
    lines = [
        ("", "no speculation", "DSPARK_ADAPTIVE"),
        ("tokens", str(plain.tokens), str(adaptive.tokens)),
        ("seconds", f"{plain.seconds:.2f}", f"{adaptive.seconds:.2f}"),
        ("tokens/s, all requests together", f"{plain.tokens_per_second:.1f}", f"{adaptive.tokens_per_second:.1f}"),
        ("accepted length, tokens", "1.00", f"{counters['committed_tokens'] / max(rows, 1):.2f}"),
        ("draft tokens verified a step (budget)", "0.0", f"{(counters['verify_tokens'] - rows) / max(steps, 1):.1f}"),
        ("verify tokens a step", "-", f"{counters['verify_tokens'] / max(steps, 1):.1f}"),
        ("requests a step", "-", f"{rows / max(steps, 1):.1f}"),
    ]
    text = [f"{name:<40}{left:>16}{right:>18}" for name, left, right in lines]
    ratio = adaptive.tokens_per_second / plain.tokens_per_second
    text.append(f"{'speed against no speculation':<40}{'':>16}{ratio:>17.2f}x")
    text.append(f"accepted of those verified, draft 1, 2, ...: {accepted}")
    text.append(f"steps: {decisions or steps}")
    return "\n".join(text)


def dialogue(questions: Sequence[str], texts: Sequence[str]) -> str:
    """Questions and answers, wrapped."""
    wrap = textwrap.TextWrapper(width=110, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(
        f"  {number}. {question}\n{wrap.fill(' '.join(text.split()))}"
        for number, (question, text) in enumerate(zip(questions, texts, strict=True), 1)
    )
