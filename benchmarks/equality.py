"""Greedy tokens of one set-up against another's, with a control: how far the reference differs from itself.

At temperature 0 speculation must not change a token. On a GPU it may all the same: kernels add in another order for
another number of rows. So the reference is also asked with another number of requests at a time, and what differs there
is the kernels' doing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from sglang_adaptive.benchmarks import config, prompts
from sglang_adaptive.benchmarks.config import Arm, Sweep
from sglang_adaptive.benchmarks.load import server_state
from sglang_adaptive.benchmarks.server import ServerFailed, for_arm
from sglang_adaptive.benchmarks.streams import endless_connector
from sglang_adaptive.errors import AdaptiveError

INCOMPLETE = 3


@dataclass(frozen=True)
class Agreement:
    """Of ``prompts`` answers ``equal`` are the same; ``prefix`` is the mean length before the first difference."""

    prompts: int
    equal: int
    prefix: float

    def __str__(self) -> str:
        return f"{self.equal}/{self.prompts} equal, {self.prefix:.1f} tokens before the first difference"


def agreement(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> Agreement:
    """How far two lists of answers, token ids each, are the same."""
    prefixes = [
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
        for a, b in zip(first, second, strict=True)
    ]
    equal = sum(list(a) == list(b) for a, b in zip(first, second, strict=True))
    return Agreement(len(prefixes), equal, sum(prefixes) / max(len(prefixes), 1))


async def greedy(url: str, fields: Sequence[dict[str, Any]], tokens: int, at_a_time: int) -> list[list[int]]:
    """The ``tokens`` ids that follow each prompt at temperature 0, ``at_a_time`` requests running together.

    Raises RuntimeError where a request fails.
    """
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    gate = asyncio.Semaphore(at_a_time)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=endless_connector(), timeout=timeout) as http:

        async def ask(one: dict[str, Any]) -> list[int]:
            async with gate, http.post(f"{url}/generate", json={**one, "sampling_params": sampling}) as answer:
                body = await answer.json(content_type=None)
                if answer.status != 200 or "output_ids" not in body:
                    raise RuntimeError(f"{url} answered {answer.status}: {json.dumps(body)[:200]}")
                return body["output_ids"]

        return list(await asyncio.gather(*map(ask, fields)))


def _answers(sweep: Sweep, arm: Arm, fields: list[dict[str, Any]], tokens: int, logs: Path) -> dict[str, Any]:
    """Answers of one arm: all at a time, and for a reference a few at a time, too."""
    server = for_arm(sweep, arm, sweep.arms.index(arm), logs / f"{arm.name}.log")
    try:
        server.wait_ready(sweep.start_timeout)
        result: dict[str, Any] = {"ids": asyncio.run(greedy(server.url, fields, tokens, len(fields)))}
        if arm.role != "ours":
            result["few"] = asyncio.run(greedy(server.url, fields, tokens, 4))
        state = asyncio.run(server_state(server.url)).get("sglang_adaptive") or {}
        return result | {"decisions": state.get("decisions"), "accept_length": state.get("accept_length")}
    except (ServerFailed, RuntimeError, aiohttp.ClientError, TimeoutError) as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:2000]}"}
    finally:
        server.stop()


def pairs(sweep: Sweep) -> list[tuple[Arm, Arm]]:
    """(reference, ours): each arm of ours with the last arm before it that is not."""
    found: list[tuple[Arm, Arm]] = []
    reference = None
    for arm in sweep.arms:
        if arm.role != "ours":
            reference = arm
        elif reference is None:
            raise AdaptiveError(f"Arm {arm.name} has no arm before it to be compared with.")
        else:
            found.append((reference, arm))
    return found


def table(sweep: Sweep, answers: dict[str, Any]) -> str:
    """A markdown table of what was answered so far."""
    lines = ["| arm | against | greedy tokens | the reference against itself, 4 at a time | decisions |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for reference, ours in pairs(sweep):
        theirs, mine = answers.get(reference.name), answers.get(ours.name)
        if theirs is None or mine is None:
            continue
        failed = mine.get("failed") or theirs.get("failed")
        if failed:
            lines.append(f"| {ours.name} | {reference.name} | failed: {failed.splitlines()[0]} | | |")
            continue
        control = agreement(theirs["ids"], theirs["few"])
        found = agreement(theirs["ids"], mine["ids"])
        lines.append(f"| {ours.name} | {reference.name} | {found} | {control} | {mine['decisions']} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Compare greedy tokens of every arm of ours with the arm before it. Status 3: arms are left."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks equality", description=main.__doc__)
    parser.add_argument("--config", type=Path, required=True, help="a sweep's file, like configs/equality.toml")
    parser.add_argument("--out", type=Path, required=True, help="answers.json and the servers' logs go there")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="minutes")
    arguments = parser.parse_args(argv)
    began, sweep = time.monotonic(), config.read(arguments.config)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "answers.json"
    answers = json.loads(path.read_text()) if path.exists() else {}
    source = prompts.make(sweep.prompts, arguments.config.parent)
    fields = [source.request(index, 0) for index in range(arguments.prompts)]
    missing = [arm for arm in sweep.arms if arm.name not in answers]
    for first in range(0, len(missing), sweep.resident):
        group = missing[first : first + sweep.resident]
        if time.monotonic() - began + sweep.start_estimate > 60 * arguments.stop_after:
            print(table(sweep, answers))
            return INCOMPLETE
        with ThreadPoolExecutor(len(group)) as pool:
            # A server dies with the thread that started it, so one thread sees it through.
            jobs = {pool.submit(_answers, sweep, arm, fields, arguments.tokens, arguments.out): arm for arm in group}
            for job in as_completed(jobs):
                name = jobs[job].name
                answers[name] = job.result()
                path.write_text(json.dumps(answers))
                outcome = answers[name].get("failed", "answered").splitlines()[0]
                print(f"[{time.monotonic() - began:5.0f} s] {name}: {outcome}", flush=True)
    print(table(sweep, answers))
    return 0
