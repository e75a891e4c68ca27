"""What a soak asks at random, and which ends an answer may have."""

from __future__ import annotations

import random
import re
from typing import Any

from sglang_adaptive.benchmarks.prompts import Prompts

# Both mean something to any tokenizer: letters, digits and spaces, and words that are common in some text or other.
REGEX = "[a-z0-9 ]{1,60}"
# A tokenizer of whole words puts spaces between them that the grammar does not see, so only the characters are judged.
_MATCHES = re.compile("[a-z0-9 ]+")
# The host looks at the length first, so a stop string may be complete in the last token of an answer that ended by it.
_LAST_TOKEN = 32
STOP_STRINGS = ("e1", "h1", "the", "1")


class Drawer:
    """Bodies of ``/generate``, from ``draw`` and ``prompts``; ``texts``: the server has a tokenizer, so that stop
    strings and structured output can be asked for."""

    def __init__(self, prompts: Prompts, draw: random.Random, texts: bool) -> None:
        self._prompts, self._draw, self._texts = prompts, draw, texts
        self._number = 0

    def plain(self, tokens: int) -> dict[str, Any]:
        """Greedy or sampled, exactly ``tokens`` tokens."""
        self._number += 1
        sampling = {"max_new_tokens": max(tokens, 1), "ignore_eos": True, "temperature": self._draw.choice((0.0, 1.0))}
        rid = f"soak-{id(self)}-{self._number}"
        return {**self._prompts.request(self._number, "soak"), "sampling_params": sampling, "rid": rid}

    def any(self, tokens: int) -> dict[str, Any]:
        """With options drawn at random on top."""
        body = self.plain(tokens)
        sampling = body["sampling_params"]
        kinds = [{}, {}, {}, {"ignore_eos": False}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}]
        kinds += [{"presence_penalty": 0.7}, {"min_new_tokens": max(tokens // 2, 1), "ignore_eos": False}]
        if sampling["temperature"]:
            kinds += [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}]
        if self._texts:
            kinds += [{"stop": [self._draw.choice(STOP_STRINGS)]}, {"regex": REGEX, "ignore_eos": False}]
        sampling |= self._draw.choice(kinds)
        if self._draw.random() < 0.1:
            body["return_logprob"] = True
        return body


def wrong(body: dict[str, Any], status: int, answer: Any, aborted: bool = False) -> str | None:
    """What is wrong with a whole answer; None where it ended as it may. ``aborted``: its abort was asked for."""
    if status != 200 or not isinstance(answer, dict):
        return f"status {status}"
    sampling, meta = body["sampling_params"], answer.get("meta_info") or {}
    end, tokens, text = ending(answer), meta.get("completion_tokens"), answer.get("text") or ""
    if end == "abort":
        return None if aborted else "aborted unasked"
    if end == "length":
        if tokens != sampling["max_new_tokens"]:
            return f"{tokens} tokens instead of {sampling['max_new_tokens']}"
        if any(stop in text[:-_LAST_TOKEN] for stop in sampling.get("stop", ())):
            return "went on after a stop string"
        return None
    if end != "stop" or (sampling["ignore_eos"] and "stop" not in sampling):
        return f"ended by {end}"
    if "regex" in sampling and not _MATCHES.fullmatch(text):
        return f"{text!r} does not match {sampling['regex']}"
    return None


def ending(answer: dict[str, Any]) -> str | None:
    """The type of the finish reason."""
    return ((answer.get("meta_info") or {}).get("finish_reason") or {}).get("type")
