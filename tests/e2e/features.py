"""Requests for the end-to-end tests of features: what one asks for, sent at the same time, and answers compared."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import requests
import tiny_draft
import tiny_language as language
from server import Server

from sglang_adaptive.launch.client import REQUEST_OPTIONS, together

# Additive penalties and the repetition penalty apart: without overlap the host applies them in the order of a set.
PENALTIES = {
    "frequency": {"frequency_penalty": 2.0},
    "presence": {"presence_penalty": 2.0, "logit_bias": {str(word): 6.0 for word in range(10, 16)}},
    "repetition": {"repetition_penalty": 1.8},
    "both": {"frequency_penalty": 1.2, "presence_penalty": 1.9},
}


def request(prompt: str | list[int], tokens: int = 48, **options: Any) -> dict[str, Any]:
    """The body of a greedy request that goes on after an end of text, unless ``options`` say otherwise."""
    top = {name: options.pop(name) for name in list(options) if name in REQUEST_OPTIONS}
    key = "text" if isinstance(prompt, str) else "input_ids"
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": tokens, **options}
    return {key: prompt, "sampling_params": sampling, **top}


def penalised() -> list[dict]:
    """Requests of every kind of penalty between others that have none, of different lengths, over few words."""
    kinds = [{}, *PENALTIES.values()]
    prompts = language.random_prompts(15, seed=31, kinds=(language.HARD, language.MIXED))
    return [request(prompt, 52 + 3 * i, **kinds[i % 5]) for i, prompt in enumerate(prompts)]


# Prompts end so far from the end of the tiny target's context; the host admits none that ends nearer than seven tokens.
ROOM = (7, 8, 9, 40)


def up_to_the_context_length() -> list[dict]:
    """Requests that ask for all that fits into the context of the tiny target; the host keeps two tokens of it free."""
    texts = [language.text(random.Random(room), language.EASY, tiny_draft.CONTEXT_LENGTH - room) for room in ROOM]
    return [request(text, room) for text, room in zip(texts, ROOM, strict=True)]


def left_of_the_context(found: Sequence[tuple[list[int], str, Any]]) -> list[int]:
    """Tokens of the context that the answers to :func:`up_to_the_context_length` left free."""
    return [room - len(ids) for room, (ids, _, _) in zip(ROOM, found, strict=True)]


def answers(server: Server, bodies: Sequence[dict[str, Any]]) -> list[Any]:
    """The answers of ``/generate``, all requests running at the same time."""
    return together(lambda body: server.client.post("/generate", body), bodies)


def outputs(server: Server, bodies: Sequence[dict[str, Any]]) -> list[tuple[list[int], str, Any]]:
    """Token ids, text and reason of the end of each answer."""
    return [
        (answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"])
        for answer in answers(server, bodies)
    ]


def events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What a streaming request sends, without the end mark."""
    url = server.client.url + path
    with requests.post(url, json={**body, "stream": True}, stream=True, timeout=300) as answer:
        answer.raise_for_status()
        lines = [line.removeprefix(b"data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def borrow_costs(folder: Path, into: Path, **facts: Any) -> Path:
    """A cache folder with the cost table of ``folder``, as if it had been profiled on a server with other ``facts``.

    The table is the folder's oldest, left by the server that came first: servers with other facts add theirs later.
    """
    source = min(folder.glob("cost-*.json"), key=lambda path: path.stat().st_mtime_ns)
    table = json.loads(source.read_text())
    table["key"] |= {name: fact if isinstance(fact, str) else json.dumps(fact) for name, fact in facts.items()}
    name = hashlib.sha256(json.dumps(table["key"], sort_keys=True).encode()).hexdigest()[:16]
    into.mkdir(exist_ok=True)
    (into / f"cost-{name}.json").write_text(json.dumps(table))
    return into
