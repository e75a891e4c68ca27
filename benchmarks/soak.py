"""Mixed load for a long time: requests that join, end, are aborted and lose their client, in crowds that come and go.

Nothing is timed. What counts is that every request gets an end that it may have: its tokens, or our abort. Rounds of
one kind follow each other: a crowd of 64 whose answers end one by one, short ones among long ones, aborts, clients that
hang up, and single requests. Between rounds the server must be idle again, with its KV cache free.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from sglang_adaptive.benchmarks import config
from sglang_adaptive.benchmarks.prompts import Prompts, SyntheticPrompts, make, read_packed
from sglang_adaptive.benchmarks.server import for_arm

PATIENCE = 180.0


class Soak:
    """``counts`` what became of the requests; ``troubles`` what should not have happened."""

    def __init__(
        self, url: str, prompts: Prompts, crowd: int, tokens: int, seed: int, patience: float = PATIENCE
    ) -> None:
        self.url, self.prompts, self.crowd, self.tokens = url.rstrip("/"), prompts, crowd, tokens
        self.patience = patience
        self.counts: Counter[str] = Counter()
        self.troubles: list[str] = []
        self._draw = random.Random(seed)
        self._number = 0
        self._idle_tokens: int | None = None

    async def run(self, seconds: float, say: Callable[[str], None] = print) -> None:
        """Rounds until the time is over or something went wrong."""
        end = time.monotonic() + seconds
        rounds = (self._shrinking, self._mixed, self._aborted, self._hung_up, self._alone)
        number = 0
        while time.monotonic() < end and not self.troubles:
            # A new session for each round: the client restarts.
            timeout = aiohttp.ClientTimeout(total=self.patience)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._http:
                name = rounds[number % len(rounds)].__name__[1:]
                await rounds[number % len(rounds)]()
                await self._settled(name)
            number += 1
            if number % len(rounds) == 0:
                say(f"{number} rounds, {dict(self.counts)}, {max(end - time.monotonic(), 0):.0f} s left")

    async def _shrinking(self) -> None:
        steps = max(self.tokens // self.crowd, 1)
        await asyncio.gather(*(self._ask((place + 1) * steps) for place in range(self.crowd)))

    async def _mixed(self) -> None:
        async def later(tokens: int) -> None:
            await asyncio.sleep(self._draw.random())
            await self._ask(tokens)

        lengths = [self._draw.choice((1, 2, 8, self.tokens // 4, self.tokens)) for _ in range(self.crowd)]
        await asyncio.gather(*map(later, lengths))

    async def _aborted(self) -> None:
        tasks = [asyncio.create_task(self._ask(4 * self.tokens, abort=True)) for _ in range(self.crowd // 2)]
        tasks += [asyncio.create_task(self._ask(self.tokens // 2)) for _ in range(self.crowd // 2)]
        await asyncio.gather(*tasks)

    async def _hung_up(self) -> None:
        async def leave() -> None:
            body = self._body(4 * self.tokens) | {"stream": True}
            async with self._http.post(f"{self.url}/generate", json=body) as answer:
                await answer.content.readany()
            self.counts["hung up"] += 1

        await asyncio.gather(*(leave() for _ in range(self.crowd // 4)), self._ask(self.tokens))

    async def _alone(self) -> None:
        for _ in range(3):
            await self._ask(self.tokens)

    def _body(self, tokens: int) -> dict[str, Any]:
        self._number += 1
        sampling = {"max_new_tokens": max(tokens, 1), "ignore_eos": True, "temperature": self._draw.choice((0.0, 1.0))}
        return {
            **self.prompts.request(self._number, "soak"),
            "sampling_params": sampling,
            "rid": f"soak-{id(self)}-{self._number}",
        }

    async def _ask(self, tokens: int, abort: bool = False) -> None:
        body = self._body(tokens)
        aborting = asyncio.create_task(self._abort(body["rid"])) if abort else None
        try:
            async with self._http.post(f"{self.url}/generate", json=body) as answer:
                found = await answer.json(content_type=None)
            meta = found.get("meta_info") or {} if isinstance(found, dict) else {}
            reason = (meta.get("finish_reason") or {}).get("type")
            if reason == "abort" and abort:
                self.counts["aborted"] += 1
            elif reason == "length" and meta.get("completion_tokens") == body["sampling_params"]["max_new_tokens"]:
                self.counts["finished"] += 1
            else:
                self.troubles.append(f"{body['rid']} answered {answer.status}: {json.dumps(found)[:300]}")
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            self.troubles.append(f"{body['rid']} got no end: {type(error).__name__}: {error}")
        finally:
            if aborting is not None:
                aborting.cancel()
                await asyncio.gather(aborting, return_exceptions=True)

    async def _abort(self, rid: str) -> None:
        await asyncio.sleep(self._draw.random())
        while True:  # one that the server has not dispatched yet misses the call
            async with self._http.post(f"{self.url}/abort_request", json={"rid": rid}):
                pass
            await asyncio.sleep(1.0)

    async def _settled(self, after: str) -> None:
        """Wait until nothing runs, and look whether every KV slot came back."""
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            try:
                async with self._http.get(f"{self.url}/v1/loads?include=all") as answer:
                    loads = (await answer.json(content_type=None))["loads"]
            except (TimeoutError, aiohttp.ClientError, ValueError) as error:
                self.troubles.append(f"after {after} the server did not answer: {type(error).__name__}: {error}")
                return
            if not any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in loads):
                break
            await asyncio.sleep(0.2)
        else:
            self.troubles.append(f"after {after} requests still run on the server that nobody waits for")
            return
        used = sum(load["num_used_tokens"] for load in loads)
        self._idle_tokens = used if self._idle_tokens is None else self._idle_tokens
        if used > self._idle_tokens:
            self.troubles.append(f"after {after} {used - self._idle_tokens} KV slots are missing")


def main(argv: Sequence[str]) -> int:
    """Send mixed load for a long time; status 1 where a request, or a KV slot, is lost."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks soak", description=main.__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a running server")
    where.add_argument("--config", type=Path, help="a sweep's file: start the server of --arm, with its prompts")
    parser.add_argument("--arm", default="adaptive")
    parser.add_argument("--log", type=Path, default=Path("soak.log"), help="output of a server that is started")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--crowd", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of a long answer")
    parser.add_argument("--prompts", type=Path, help="packed prompts; without it random token ids")
    parser.add_argument("--token-ids", type=int, nargs=2, default=(1000, 10000), metavar=("LOW", "HIGH"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    begin, server, url = time.monotonic(), None, arguments.url
    source: Prompts = SyntheticPrompts(tuple(arguments.token_ids), (1, 256))
    if arguments.prompts:
        source = Prompts(read_packed(arguments.prompts))
    try:
        if arguments.config:
            sweep = config.read(arguments.config)
            (arm,) = (arm for arm in sweep.arms if arm.name == arguments.arm)
            source = make(sweep.prompts, arguments.config.parent)
            server = for_arm(sweep, arm, sweep.arms.index(arm), arguments.log)
            server.wait_ready(sweep.start_timeout)
            url = server.url
        soak = Soak(url, source, arguments.crowd, arguments.tokens, arguments.seed)
        left = 60 * arguments.minutes - (time.monotonic() - begin)
        asyncio.run(soak.run(left, lambda text: print(text, flush=True)))
    finally:
        if server is not None:
            server.stop()
    print(f"{dict(soak.counts)}; {len(soak.troubles)} troubles", *soak.troubles[:10], sep="\n")
    return 1 if soak.troubles else 0
