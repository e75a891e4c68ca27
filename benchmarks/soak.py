"""Mixed load for a long time: requests that join, end, are aborted and lose their client, in crowds that come and go.

Nothing is timed. What counts is that every request gets an end that it may have: its tokens, or our abort. Rounds of
one kind follow each other: a crowd of 64 whose answers end one by one, short ones among long ones, aborts, clients that
hang up, and single requests. With ``--steps`` and ``--requests`` they are random crowds of random requests, and short
ones, until the server has made so many decode steps, and answered so many short requests. Between rounds the server
must be idle again, with its KV cache free.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from sglang_adaptive.benchmarks import config, machine
from sglang_adaptive.benchmarks.prompts import Prompts, SyntheticPrompts, make, read_packed
from sglang_adaptive.benchmarks.server import for_arm
from sglang_adaptive.benchmarks.soak_requests import Drawer, ending, wrong
from sglang_adaptive.benchmarks.soak_state import SoakState, merged
from sglang_adaptive.benchmarks.streams import endless_connector
from sglang_adaptive.errors import AdaptiveError

PATIENCE = 180.0
SHORT_ROUND = 500


class Soak:
    """``state.chunk`` counts what became of the requests, and keeps the ``troubles`` that should not have happened.

    ``steps`` and ``requests`` are where the state's sums shall get; 0: no such aim.
    """

    def __init__(
        self,
        url: str,
        prompts: Prompts,
        crowd: int,
        tokens: int,
        seed: int,
        patience: float = PATIENCE,
        state: SoakState | None = None,
        steps: int = 0,
        requests: int = 0,
    ) -> None:
        self.url, self.crowd, self.tokens, self.patience = url.rstrip("/"), crowd, tokens, patience
        self.state = state or SoakState(None, {})
        self.chunk, self.troubles = self.state.chunk, self.state.chunk["troubles"]
        self._steps, self._requests = steps, requests
        self._draw = random.Random(f"{seed}/{len(self.state.chunks)}")
        self._prompts, self._drawer = prompts, Drawer(prompts, self._draw, texts=False)
        self._idle_tokens: int | None = None
        self._first_step = 0

    @property
    def counts(self) -> dict[str, int]:
        """Requests by what became of them."""
        return self.chunk["outcomes"]

    async def run(self, seconds: float, say: Callable[[str], None] = print) -> None:
        """Rounds until the aims are reached, the time is over or something went wrong."""
        begin, number = time.monotonic(), 0
        async with self._session() as self._http:
            await self._settled("the start")
            if not self.troubles:
                await self._look_at_the_server()
        self.state.write()
        while time.monotonic() < begin + seconds and not self.troubles:
            rounds = self._rounds()
            if not rounds:
                break
            name = rounds[number % len(rounds)].__name__[1:]
            # A new session for each round: the client restarts.
            async with self._session() as self._http:
                await rounds[number % len(rounds)]()
                await self._settled(name)
                await self._count_steps()
            number += 1
            self.chunk["seconds"] = round(time.monotonic() - begin, 1)
            self.state.write()
            if number % 5 == 0:
                say(f"{number} rounds, {self.chunk['steps']} steps, {self.counts}, {self.chunk['seconds']:.0f} s")

    def _rounds(self) -> list[Callable[[], Any]]:
        if not self._steps and not self._requests:
            return [self._shrinking, self._mixed, self._aborted, self._hung_up, self._alone]
        aims = (
            (self._random, "steps", self._steps),
            (self._short, "short_requests", self._requests),
        )
        return [act for act, name, aim in aims if self.state[name] < aim]

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self.patience)
        return aiohttp.ClientSession(connector=endless_connector(), timeout=timeout)

    async def _random(self) -> None:
        """A crowd of any size in which requests follow each other; some are aborted, some lose their client."""
        crowd = round(2 ** self._draw.uniform(0, (self.crowd).bit_length() - 1))

        async def one_after_another() -> None:
            for _ in range(self._draw.randint(2, 8)):
                body = self._drawer.any(round(2 ** self._draw.uniform(0, self.tokens.bit_length() - 1)))
                act = self._draw.random()
                if act < 0.08:
                    await self._leave(body, wait=self._draw.random() < 0.7)
                else:
                    await self._ask(body, abort=act < 0.16)

        await asyncio.gather(*(one_after_another() for _ in range(crowd)))

    async def _short(self) -> None:
        """Answers of one to four tokens, as many clients at a time as the crowd has."""
        left = min(SHORT_ROUND, self._requests)

        async def one_after_another() -> None:
            nonlocal left
            while left > 0 and not self.troubles:
                left -= 1
                await self._ask(self._drawer.plain(self._draw.randint(1, 4)))
                self.chunk["short_requests"] += 1

        await asyncio.gather(*(one_after_another() for _ in range(self.crowd)))

    async def _shrinking(self) -> None:
        steps = max(self.tokens // self.crowd, 1)
        await asyncio.gather(*(self._ask(self._drawer.plain((place + 1) * steps)) for place in range(self.crowd)))

    async def _mixed(self) -> None:
        async def later(tokens: int) -> None:
            await asyncio.sleep(self._draw.random())
            await self._ask(self._drawer.plain(tokens))

        lengths = [self._draw.choice((1, 2, 8, self.tokens // 4, self.tokens)) for _ in range(self.crowd)]
        await asyncio.gather(*map(later, lengths))

    async def _aborted(self) -> None:
        half = range(self.crowd // 2)
        tasks = [asyncio.create_task(self._ask(self._drawer.plain(4 * self.tokens), abort=True)) for _ in half]
        tasks += [asyncio.create_task(self._ask(self._drawer.plain(self.tokens // 2))) for _ in half]
        await asyncio.gather(*tasks)

    async def _hung_up(self) -> None:
        leaving = (self._leave(self._drawer.plain(4 * self.tokens), wait=True) for _ in range(self.crowd // 4))
        await asyncio.gather(*leaving, self._ask(self._drawer.plain(self.tokens)))

    async def _alone(self) -> None:
        for _ in range(3):
            await self._ask(self._drawer.plain(self.tokens))

    async def _leave(self, body: dict[str, Any], wait: bool) -> None:
        """Close the connection, after the first token if ``wait``."""
        try:
            async with self._http.post(f"{self.url}/generate", json=body | {"stream": True}) as answer:
                if wait:
                    await answer.content.readany()
            self._became("hung up")
        except (TimeoutError, aiohttp.ClientError) as error:
            self._trouble("hangs", f"{body['rid']} got no token: {type(error).__name__}: {error}")

    async def _ask(self, body: dict[str, Any], abort: bool = False) -> None:
        aborting = asyncio.create_task(self._abort(body["rid"])) if abort else None
        try:
            async with self._http.post(f"{self.url}/generate", json=body) as answer:
                found = await answer.json(content_type=None)
            fault = wrong(body, answer.status, found, aborted=abort)
            if fault is None:
                self._became({"abort": "aborted", "stop": "stopped"}.get(ending(found) or "", "finished"))
            else:
                self._trouble("errors", f"{body['rid']} {fault}; answered {answer.status}: {json.dumps(found)[:300]}")
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            kind = "hangs" if isinstance(error, TimeoutError) else "errors"
            self._trouble(kind, f"{body['rid']} got no end: {type(error).__name__}: {error}")
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
                loads = (await self._get("/v1/loads?include=all"))["loads"]
            except (TimeoutError, aiohttp.ClientError, ValueError) as error:
                self._trouble("errors", f"after {after} the server did not answer: {type(error).__name__}: {error}")
                return
            if not any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in loads):
                break
            await asyncio.sleep(0.2)
        else:
            self._trouble("hangs", f"after {after} requests still run on the server that nobody waits for")
            return
        used = sum(load["num_used_tokens"] for load in loads)
        self._idle_tokens = used if self._idle_tokens is None else self._idle_tokens
        self.chunk["kv_tokens"] = {"before": self._idle_tokens, "after": used}
        if used > self._idle_tokens:
            self._trouble("leaks", f"after {after} {used - self._idle_tokens} KV slots are missing")

    async def _look_at_the_server(self) -> None:
        info = await self._get("/server_info")
        self._drawer = Drawer(self._prompts, self._draw, texts=info.get("skip_tokenizer_init") is False)
        if self._steps and _steps(info) is None:
            raise AdaptiveError("The server does not count its decode steps: --steps needs one of DSPARK_ADAPTIVE.")
        self._first_step = _steps(info) or 0

    async def _count_steps(self) -> None:
        if self.troubles:
            return
        self.chunk["steps"] = (_steps(await self._get("/server_info")) or 0) - self._first_step

    async def _get(self, path: str) -> Any:
        async with self._http.get(f"{self.url}{path}") as answer:
            return await answer.json(content_type=None)

    def _became(self, what: str) -> None:
        self.chunk["requests"] += 1
        self.counts[what] = self.counts.get(what, 0) + 1

    def _trouble(self, kind: str, text: str) -> None:
        self.chunk[kind] += 1
        self.troubles.append(text)


def _steps(info: dict[str, Any]) -> int | None:
    """Decode steps since the server started; None where it does not count them."""
    states = [each["sglang_adaptive"] for each in info.get("internal_states", ()) if each.get("sglang_adaptive")]
    return sum(state["steps"] for state in states) if states else None


def main(argv: Sequence[str]) -> int:
    """Send mixed load for a long time; status 1 where a request, or a KV slot, is lost."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks soak", description=main.__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a running server")
    where.add_argument("--config", type=Path, help="a sweep's file: start the server of --arm, with its prompts")
    where.add_argument("--sum", type=Path, nargs="+", metavar="STATE", help="add up state files, and end")
    parser.add_argument("--arm", default="adaptive")
    parser.add_argument("--log", type=Path, default=Path("soak.log"), help="output of a server that is started")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=0, help="random load until the server made so many decode steps")
    parser.add_argument("--requests", type=int, default=0, help="short requests until so many are answered")
    parser.add_argument("--state", type=Path, help="JSON file that this run adds itself to; earlier ones count")
    parser.add_argument("--crowd", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of a long answer")
    parser.add_argument("--prompts", type=Path, help="packed prompts; without it random token ids")
    parser.add_argument("--token-ids", type=int, nargs=2, default=(1000, 10000), metavar=("LOW", "HIGH"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.sum:
        print(json.dumps(merged(arguments.sum), indent=1))
        return 0
    begin, server, url = time.monotonic(), None, arguments.url
    source: Prompts = SyntheticPrompts(tuple(arguments.token_ids), (1, 256))
    if arguments.prompts:
        source = Prompts(read_packed(arguments.prompts))
    about = {"command": ["soak", *argv], "machine": machine.describe(), "python": sys.version.split()[0]}
    state = SoakState(arguments.state, about)
    try:
        if arguments.config:
            sweep = config.read(arguments.config)
            (arm,) = (arm for arm in sweep.arms if arm.name == arguments.arm)
            source = make(sweep.prompts, arguments.config.parent)
            server = for_arm(sweep, arm, sweep.arms.index(arm), arguments.log)
            server.wait_ready(sweep.start_timeout)
            url = server.url
        aims = {"state": state, "steps": arguments.steps, "requests": arguments.requests}
        soak = Soak(url, source, arguments.crowd, arguments.tokens, arguments.seed, **aims)
        left = 60 * arguments.minutes - (time.monotonic() - begin)
        asyncio.run(soak.run(left, lambda text: print(text, flush=True)))
    finally:
        state.write()
        if server is not None:
            server.stop()
    print(f"{soak.chunk['steps']} steps, {soak.counts}; {len(soak.troubles)} troubles", *soak.troubles[:10], sep="\n")
    return 1 if soak.troubles else 0
