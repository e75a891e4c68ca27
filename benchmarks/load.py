"""A closed loop of streaming requests against a server's /generate, measured from the client.

A fixed number of workers each keep one request going. What counts is a steady window: it begins when every worker has
received a first token (plus a moment to settle) and ends before the load is cut off, so ramp-up and tail are outside.
The first request of each worker is shortened to a different length, or all of them would end in the same step.

Many workers are spread over processes (``streams``, ``load_worker``), and what the generator itself needed is reported
with every measurement: a generator without a core to spare measures itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from sglang_adaptive.benchmarks.prompts import Prompts, SyntheticPrompts, read_packed
from sglang_adaptive.benchmarks.result import summarize
from sglang_adaptive.benchmarks.shares import LocalShare, RemoteShare, Share
from sglang_adaptive.benchmarks.stats import percentiles
from sglang_adaptive.benchmarks.streams import Request

STREAMS_PER_PROCESS = 32


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


def processes_for(concurrency: int, cores: int | None = None) -> int:
    """How many processes send ``concurrency`` requests: one for each 32, on at most a third of the cores."""
    cores = cores or len(os.sched_getaffinity(0))
    return max(1, min(-(-concurrency // STREAMS_PER_PROCESS), cores // 3))


class Runner:
    """One run of a Load; ``requests``, ``window`` and ``generator`` (what sending took) are what it leaves."""

    def __init__(self, url: str, load: Load, processes: int | None = None) -> None:
        self.url, self.load = url.rstrip("/"), load
        self.processes = processes or processes_for(load.concurrency)
        self.requests: list[Request] = []
        self.window: tuple[float, float] | None = None
        self.generator: dict[str, Any] = {}

    async def run(self) -> None:
        """Send the load; raises RuntimeError where no window could be measured."""
        count = self.processes
        shares: list[Share] = [
            LocalShare(self.url, self.load) if count == 1 else RemoteShare(self.url, self.load, first, count)
            for first in range(count)
        ]
        try:
            for share in shares:
                await share.start()
            await self._measure(shares)
        finally:
            for share in shares:
                await share.close()
            self.requests = [request for share in shares for request in share.requests]
        self.generator = self._overhead(shares)

    async def _measure(self, shares: list[Share]) -> None:
        everybody = asyncio.gather(*(share.decoding.wait() for share in shares))
        over = asyncio.gather(*(asyncio.shield(share.finished) for share in shares), return_exceptions=True)
        try:
            await asyncio.wait({everybody, over}, timeout=self.load.ramp_timeout, return_when=asyncio.FIRST_COMPLETED)
            if not everybody.done():
                await self._stop(shares, over)
                _raise_failures(shares)
                raise RuntimeError(self._not_ramped(shares))
            if self.load.seconds is None:
                begin = time.perf_counter()
                await over
                idle = [share.first_idle for share in shares if share.first_idle is not None]
                self.window = (begin, max(min(idle, default=begin), begin))
                return
            await asyncio.sleep(self.load.settle_seconds)
            begin = time.perf_counter()
            await asyncio.wait({over}, timeout=self.load.seconds)
            self.window = (begin, time.perf_counter())
            if over.done():
                raise RuntimeError(f"the load ended early: {errors_of(shares)}")
            await self._stop(shares, over)
        finally:
            everybody.cancel()
            over.cancel()
            await asyncio.gather(everybody, over, return_exceptions=True)
        _raise_failures(shares)

    def _not_ramped(self, shares: list[Share]) -> str:
        started = sum(bool(request.stamps) for share in shares for request in share.requests)
        return (
            f"{min(started, self.load.concurrency)} of {self.load.concurrency} requests got a first token within "
            f"{self.load.ramp_timeout:g} s; {errors_of(shares) or 'no error was answered'}"
        )

    async def _stop(self, shares: list[Share], over: asyncio.Future[Any]) -> None:
        """End what runs: an aborted request still answers its statistics. One that the server had not dispatched yet
        misses the call, hence again."""
        for share in shares:
            share.stop()
        for _ in range(60):
            if over.done():
                return
            await post(f"{self.url}/abort_request", {"rid": "", "abort_all": True})
            await asyncio.wait({over}, timeout=0.5)

    def _overhead(self, shares: list[Share]) -> dict[str, Any]:
        """``busy``: CPU time of the busiest process over the window's length, ``cpu`` that of all of them; ``lag_ms``:
        how late they woke up, and so how late their stamps are at worst."""
        begin, end = self.window or (0.0, 0.0)
        busy, lags = [], []
        for share in shares:
            times = [sample.at for sample in share.samples]
            around = share.samples[max(bisect(times, begin) - 1, 0) : bisect(times, end) + 1]
            lags += [sample.lag for sample in around[1:]]
            if len(around) > 1 and around[-1].at > around[0].at:
                busy.append((around[-1].cpu - around[0].cpu) / (around[-1].at - around[0].at))
        return {
            "processes": len(shares),
            "busy": max(busy, default=0.0),
            "cpu": sum(busy),
            "lag_ms": percentiles(lags, 1e3),
        }


def _raise_failures(shares: Sequence[Share]) -> None:
    """What ended a share other than the end of its work."""
    for share in shares:
        if share.finished.done():
            share.finished.result()


def errors_of(shares: Sequence[Share]) -> str:
    """The first few different errors that requests met."""
    return "; ".join(sorted({r.error for share in shares for r in share.requests if r.error})[:3])


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


async def measure(url: str, load: Load, processes: int | None = None) -> dict[str, Any]:
    """Run ``load`` and return its aggregates (see result.summarize). Raises RuntimeError where none can be had."""
    before = await server_state(url)
    runner = Runner(url, load, processes)
    begin = time.perf_counter()
    await runner.run()
    whole = time.perf_counter() - begin
    after = await server_state(url)
    assert runner.window is not None
    return summarize(runner.requests, runner.window, before, after) | {
        "concurrency": load.concurrency,
        "temperature": load.temperature,
        "wall_seconds": whole,
        "generator": runner.generator,
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
    parser.add_argument("--token-ids", type=int, nargs=2, default=(1000, 10000), metavar=("LOW", "HIGH"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, help="send from so many (default: by concurrency and cores)")
    arguments = parser.parse_args(argv)
    if arguments.requests is not None and arguments.requests < arguments.concurrency:
        parser.error("--requests must not be below --concurrency")
    prompts: Prompts = SyntheticPrompts(tuple(arguments.token_ids), (64, 64))
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
    print(json.dumps(asyncio.run(measure(arguments.url, load, arguments.processes)), indent=1))
    return 0
