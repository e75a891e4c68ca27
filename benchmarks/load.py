"""A closed loop of streaming requests against a server's /generate, measured from the client.

A fixed number of workers each keep one request going. What counts is a steady window: it begins when every worker has
received a first token (plus a moment to settle) and ends before the load is cut off, so ramp-up and tail are outside.
The first request of each worker is shortened to a different length, or all of them would end in the same step.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from sglang_adaptive.benchmarks.prompts import Prompts, SyntheticPrompts, read_packed
from sglang_adaptive.benchmarks.result import summarize

ERRORS_IN_A_ROW = 3
MAX_LINE = 1 << 20


@dataclass(frozen=True)
class Load:
    """What to send.

    ``seconds`` is the length of the steady window, after which the load is cut off; where it is None, ``requests``
    are sent and all of them awaited. ``output_tokens`` are the bounds of a uniform draw; requests ignore the end of
    text. ``stream_interval`` (tokens between two chunks) keeps the server's streaming from being what is measured.
    """

    concurrency: int
    prompts: Prompts
    seconds: float | None = None
    requests: int | None = None
    output_tokens: tuple[int, int] = (96, 160)
    temperature: float = 1.0
    stream_interval: int = 32
    seed: int | str = 0
    settle_seconds: float = 0.5
    ramp_timeout: float = 180.0

    def body(self, index: int) -> dict[str, Any]:
        """The JSON of the ``index``-th request."""
        tokens = random.Random(f"{self.seed}/{index}/length").randint(*self.output_tokens)
        if self.seconds is not None and index < self.concurrency:
            tokens = max(tokens * (index + 1) // self.concurrency, min(tokens, 2))
        sampling = {
            "temperature": self.temperature,
            "max_new_tokens": tokens,
            "ignore_eos": True,
            "stream_interval": self.stream_interval,
        }
        return {**self.prompts.request(index, self.seed), "sampling_params": sampling, "stream": True}


@dataclass
class Request:
    """What was seen of one request: send time, ``(time, output tokens so far)`` per chunk (s), and its last meta_info.

    ``cut`` says that we ended it before its length.
    """

    sent: float
    stamps: list[tuple[float, int]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    cut: bool = False
    error: str | None = None


class Runner:
    """One run of a Load; ``requests`` and ``window`` are what it leaves."""

    def __init__(self, url: str, load: Load) -> None:
        self.url, self.load = url.rstrip("/"), load
        self.requests: list[Request] = []
        self.window: tuple[float, float] | None = None
        self._index = itertools.count()
        self._stopping = False
        self._decoding: set[int] = set()
        self._all_decoding = asyncio.Event()
        self._first_idle: float | None = None

    async def run(self) -> None:
        """Send the load; raises RuntimeError where no window could be measured."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=self.load.ramp_timeout)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=MAX_LINE) as self._http:
            workers = [asyncio.create_task(self._work(worker)) for worker in range(self.load.concurrency)]
            together = asyncio.gather(*workers, return_exceptions=True)
            try:
                await self._measure(together)
            finally:
                for worker in workers:
                    worker.cancel()
                await together
        for outcome in together.result():
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
                raise outcome

    async def _measure(self, workers: asyncio.Future[Any]) -> None:
        ramp = asyncio.create_task(self._all_decoding.wait())
        await asyncio.wait({ramp, workers}, timeout=self.load.ramp_timeout, return_when=asyncio.FIRST_COMPLETED)
        ramp.cancel()
        if not self._all_decoding.is_set():
            raise RuntimeError(
                f"{len(self._decoding)} of {self.load.concurrency} requests got a first token within "
                f"{self.load.ramp_timeout:g} s; {self._errors() or 'no error was answered'}"
            )
        if self.load.seconds is None:
            begin = time.perf_counter()
            await workers
            self.window = (begin, max(self._first_idle or begin, begin))
            return
        await asyncio.sleep(self.load.settle_seconds)
        begin = time.perf_counter()
        await asyncio.wait({workers}, timeout=self.load.seconds)
        self.window = (begin, time.perf_counter())
        if workers.done():
            raise RuntimeError(f"the load ended early: {self._errors()}")
        await self._stop(workers)

    async def _stop(self, workers: asyncio.Future[Any]) -> None:
        """End what runs: an aborted request still answers its statistics. One that the server had not dispatched yet
        misses the call, hence again."""
        self._stopping = True
        for _ in range(60):
            await post(f"{self.url}/abort_request", {"rid": "", "abort_all": True})
            await asyncio.wait({workers}, timeout=0.5)
            if workers.done():
                return

    async def _work(self, worker: int) -> None:
        failures = 0
        while not self._stopping and failures < ERRORS_IN_A_ROW:
            index = next(self._index)
            if self.load.requests is not None and index >= self.load.requests:
                break
            request = Request(time.perf_counter())
            self.requests.append(request)
            try:
                await self._stream(request, self.load.body(index), worker)
            except (TimeoutError, aiohttp.ClientError, ValueError) as error:
                request.error = f"{type(error).__name__}: {error}"
            failures = failures + 1 if request.error else 0
        self._first_idle = self._first_idle or time.perf_counter()

    async def _stream(self, request: Request, body: dict[str, Any], worker: int) -> None:
        async with self._http.post(f"{self.url}/generate", json=body) as response:
            if response.status != 200:
                request.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return
            async for line in response.content:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                self._chunk(request, json.loads(line[5:]), worker)
        if not request.done and request.error is None:
            request.error = "the stream ended without a finish reason"

    def _chunk(self, request: Request, chunk: dict[str, Any], worker: int) -> None:
        now = time.perf_counter()
        if "meta_info" not in chunk:
            request.error = f"answered {json.dumps(chunk)[:300]}"
            return
        request.meta = meta = chunk["meta_info"]
        tokens = meta.get("completion_tokens") or 0
        if tokens and (not request.stamps or tokens > request.stamps[-1][1]):
            request.stamps.append((now, tokens))
            self._decoding.add(worker)
            if len(self._decoding) == self.load.concurrency:
                self._all_decoding.set()
        reason = meta.get("finish_reason")
        if reason is None:
            return
        request.done = True
        if reason.get("type") == "abort":
            request.cut = self._stopping
            request.error = None if self._stopping else f"aborted by the server: {reason.get('message')}"

    def _errors(self) -> str:
        return "; ".join(sorted({request.error for request in self.requests if request.error})[:3])


async def server_state(url: str) -> dict[str, Any]:
    """The first internal state that /server_info reports; empty where the server has no such page."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http,
            http.get(f"{url.rstrip('/')}/server_info") as response,
        ):
            states = (await response.json(content_type=None)).get("internal_states") or [{}]
            return states[0]
    except (TimeoutError, aiohttp.ClientError, ValueError, AttributeError):
        return {}


async def post(url: str, body: dict[str, Any] | None = None) -> None:
    """Call a page of the server whose answer does not matter, like /flush_cache or /abort_request.

    Raises RuntimeError where the server does not answer.
    """
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http,
            http.post(url, json=body),
        ):
            pass
    except (TimeoutError, aiohttp.ClientError) as error:
        raise RuntimeError(f"{url} did not answer: {type(error).__name__}") from error


async def measure(url: str, load: Load) -> dict[str, Any]:
    """Run ``load`` and return its aggregates (see result.summarize). Raises RuntimeError where none can be had."""
    before = await server_state(url)
    runner = Runner(url, load)
    begin = time.perf_counter()
    await runner.run()
    whole = time.perf_counter() - begin
    after = await server_state(url)
    assert runner.window is not None
    return summarize(runner.requests, runner.window, before, after) | {
        "concurrency": load.concurrency,
        "temperature": load.temperature,
        "wall_seconds": whole,
    }


def main(argv: Sequence[str]) -> int:
    """Send one closed-loop load to a running server and print its numbers as JSON."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks load", description=main.__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--concurrency", "-c", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of the steady window")
    parser.add_argument("--requests", type=int, help="send so many instead, and wait for all of them")
    parser.add_argument("--output-tokens", type=int, nargs=2, default=(96, 160), metavar=("LOW", "HIGH"))
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", type=Path, help="packed prompts; without it random token ids")
    parser.add_argument("--template", default="{prompt}")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.requests is not None and arguments.requests < arguments.concurrency:
        parser.error("--requests must not be below --concurrency")
    prompts: Prompts = SyntheticPrompts((1000, 10000), (64, 64))
    if arguments.prompts:
        prompts = Prompts(read_packed(arguments.prompts, template=arguments.template))
    load = Load(
        concurrency=arguments.concurrency,
        prompts=prompts,
        seconds=arguments.seconds if arguments.requests is None else None,
        requests=arguments.requests,
        output_tokens=tuple(arguments.output_tokens),
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    print(json.dumps(asyncio.run(measure(arguments.url, load)), indent=1))
    return 0
