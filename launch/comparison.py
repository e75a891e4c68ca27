"""What the quickstart measures, and how it judges and shows it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TIE_NATS = {"float32": 1e-3}
DECISIONS = {
    "verify_all": "verified every draft",
    "trimmed": "verified only the drafts worth their cost",
    "not_drafted": "did not draft",
}
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
    drafts = len(counters["verified_per_position"])
    ratio = adaptive.tokens_per_second / plain.tokens_per_second
    lines = [
        ("", "no speculation", "DSPARK_ADAPTIVE", ""),
        ("tokens in all answers", str(plain.tokens), str(adaptive.tokens), ""),
        ("seconds until the last answer", f"{plain.seconds:.2f}", f"{adaptive.seconds:.2f}", ""),
        (
            "tokens/s, all requests together",
            f"{plain.tokens_per_second:.1f}",
            f"{adaptive.tokens_per_second:.1f}",
            f"{ratio:.2f} times the speed of no speculation",
        ),
        ("decode steps", "-", str(steps), f"{rows / max(steps, 1):.1f} requests in a step on average"),
        (
            "tokens verified per request and step",
            "1.00",
            f"{counters['verify_tokens'] / max(rows, 1):.2f}",
            f"of {drafts + 1}: {drafts} drafts and the token before them",
        ),
        (
            "tokens out per request and step",
            "1.00",
            f"{counters['committed_tokens'] / max(rows, 1):.2f}",
            "the accepted length",
        ),
    ]
    text = [f"{name:<38}{left:>16}{right:>18}   {note}".rstrip() for name, left, right, note in lines]
    text.append(f"drafts accepted of those verified, by position: {_by_position(counters)}")
    known = [f"{count} {DECISIONS.get(name, name)}" for name, count in counters["decisions"].items() if count]
    text.append(f"of the steps: {', '.join(known) or 'nothing known'}")
    return "\n".join(text)


def _by_position(counters: dict[str, Any]) -> str:
    pairs = zip(counters["accepted_per_position"], counters["verified_per_position"], strict=True)
    shares = [f"{hit / seen:.0%}" if seen else "-" for hit, seen in pairs]
    return "  ".join(f"{number}: {share}" for number, share in enumerate(shares, 1))


def explanation(server_info: dict[str, Any]) -> str:
    """How to read ``table``, for somebody who sees it for the first time."""
    text = (
        "How to read it: in a step the draft model proposes tokens for every request, and one forward of the served "
        "model verifies those that the plugin found worth it, beside the token that the step before produced. The "
        "tokens that pass, and one of the model's own, come out. Without speculation it is one token per request and "
        "step; with it there are fewer steps, but each costs more."
    )
    if server_info.get("device") == "cpu":
        text += (
            " This ran on a CPU, which shows that it works and what it decides. Its speed says nothing about a GPU: "
            "what was measured on one is in benchmarks/results."
        )
    return textwrap.fill(text, 110)


def dialogue(questions: Sequence[str], texts: Sequence[str]) -> str:
    """Questions and answers, wrapped."""
    wrap = textwrap.TextWrapper(width=110, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(
        f"  {number}. {question}\n{wrap.fill(' '.join(text.split()))}"
        for number, (question, text) in enumerate(zip(questions, texts, strict=True), 1)
    )
