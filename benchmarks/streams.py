"""The streaming requests of one process: each worker keeps one going, and notes when how many tokens had come."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp

if TYPE_CHECKING:
    from sglang_adaptive.benchmarks.load import Load

ERRORS_IN_A_ROW = 3
MAX_LINE = 1 << 20
SAMPLE_SECONDS = 0.05
# A chunk that ends nothing is not decoded: of its JSON only this number counts. In a text the quotes would be escaped.
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_GOES_ON = re.compile(rb'"finish_reason": ?null')


# The host closes a connection that was idle for five seconds; one that is reused just then loses its request.
KEEP_ALIVE_SECONDS = 2.0


def endless_connector() -> aiohttp.TCPConnector:
    """For as many requests at a time as there are, on connections that the server does not close meanwhile."""
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)


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


class Sample(NamedTuple):
    """This process at one moment (s): CPU seconds used so far, and how late it woke up for this."""

    at: float
    cpu: float
    lag: float


class Streams:
    """Every ``stride``-th stream of a load, beginning with ``first``, and the requests with these indices."""

    def __init__(self, url: str, load: Load, first: int, stride: int, on_decoding: Callable[[], None]) -> None:
        self.url, self.load = url, load
        self.requests: list[Request] = []
        self.samples: list[Sample] = []
        self.first_idle: float | None = None
        self._count = len(range(first, load.concurrency, stride))
        self._index = itertools.count(first, stride)
        self._stopping = False
        self._decoding: set[int] = set()
        self._on_decoding = on_decoding

    def stop(self) -> None:
        """Send nothing more; what the server aborts from now on was cut by us."""
        self._stopping = True

    async def run(self) -> None:
        """Send until stopped or until all requests are sent and answered."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=self.load.ramp_timeout)
        connector = endless_connector()
        sampling = asyncio.create_task(self._sample())
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=MAX_LINE) as self._http:
            try:
                async with asyncio.TaskGroup() as workers:
                    for worker in range(self._count):
                        workers.create_task(self._work(worker))
            finally:
                sampling.cancel()
                self.samples.append(Sample(time.perf_counter(), time.process_time(), 0.0))

    async def _sample(self) -> None:
        due = time.perf_counter()
        while True:
            now = time.perf_counter()
            self.samples.append(Sample(now, time.process_time(), max(now - due, 0.0)))
            due = now + SAMPLE_SECONDS
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _work(self, worker: int) -> None:
        failures = 0
        while not self._stopping and failures < ERRORS_IN_A_ROW:
            index = next(self._index)
            if self.load.requests is not None and index >= self.load.requests:
                break
            body = self.load.body(index)
            request = Request(time.perf_counter())
            self.requests.append(request)
            try:
                await self._stream(request, body, worker)
            except (TimeoutError, aiohttp.ClientError, ValueError) as error:
                request.error = f"{type(error).__name__}: {error}"
            failures = failures + 1 if request.error else 0
        self.first_idle = self.first_idle or time.perf_counter()

    async def _stream(self, request: Request, body: dict[str, Any], worker: int) -> None:
        async with self._http.post(f"{self.url}/generate", json=body) as response:
            if response.status != 200:
                request.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return
            async for line in response.content:
                if line.startswith(b"data:"):
                    self._chunk(request, line[5:], worker)
        if not request.done and request.error is None:
            request.error = "the stream ended without a finish reason"

    def _chunk(self, request: Request, data: bytes, worker: int) -> None:
        now = time.perf_counter()
        found = _TOKENS.search(data)
        if found and _GOES_ON.search(data):
            self._tokens(request, now, int(found[1]), worker)
        elif data.strip() != b"[DONE]":
            self._whole(request, now, json.loads(data), worker)

    def _tokens(self, request: Request, now: float, tokens: int, worker: int) -> None:
        if not tokens or (request.stamps and tokens <= request.stamps[-1][1]):
            return
        request.stamps.append((now, tokens))
        if worker not in self._decoding:
            self._decoding.add(worker)
            if len(self._decoding) == self._count:
                self._on_decoding()

    def _whole(self, request: Request, now: float, chunk: dict[str, Any], worker: int) -> None:
        if "meta_info" not in chunk:
            request.error = f"answered {json.dumps(chunk)[:300]}"
            return
        request.meta = meta = chunk["meta_info"]
        self._tokens(request, now, meta.get("completion_tokens") or 0, worker)
        reason = meta.get("finish_reason")
        if reason is None:
            return
        request.done = True
        if reason.get("type") == "abort":
            request.cut = self._stopping
            request.error = None if self._stopping else f"aborted by the server: {reason.get('message')}"
