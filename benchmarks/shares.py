"""A load's share in this process or in one of its own, to the runner the same."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sys
from typing import TYPE_CHECKING, Protocol

from sglang_adaptive.benchmarks.streams import Request, Sample, Streams

if TYPE_CHECKING:
    from sglang_adaptive.benchmarks.load import Load

# What a worker says, each on a line; after RESULT follow the length and the pickled outcome.
DECODING, RESULT = b"decoding\n", b"result\n"
STOP = b"stop\n"


class Share(Protocol):
    """Some of a load's streams. ``requests``, ``samples`` and ``first_idle`` are filled when ``finished`` is done."""

    decoding: asyncio.Event
    finished: asyncio.Future[None]
    requests: list[Request]
    samples: list[Sample]
    first_idle: float | None

    async def start(self) -> None: ...
    def stop(self) -> None: ...
    async def close(self) -> None: ...


class LocalShare:
    """All streams, in this process."""

    def __init__(self, url: str, load: Load) -> None:
        self.decoding = asyncio.Event()
        self._streams = Streams(url, load, 0, 1, self.decoding.set)
        self.requests, self.samples = self._streams.requests, self._streams.samples

    @property
    def first_idle(self) -> float | None:
        """When the first stream had nothing left to send (s)."""
        return self._streams.first_idle

    async def start(self) -> None:
        """Begin to send."""
        self.finished = asyncio.create_task(self._streams.run())

    def stop(self) -> None:
        """Send nothing more."""
        self._streams.stop()

    async def close(self) -> None:
        """Leave nothing running."""
        self.finished.cancel()
        await asyncio.gather(self.finished, return_exceptions=True)


class RemoteShare:
    """Every ``stride``-th stream, beginning with ``first``, in a process of its own. Its clock is ours."""

    def __init__(self, url: str, load: Load, first: int, stride: int) -> None:
        self._job = pickle.dumps((url, load, first, stride))
        self.decoding = asyncio.Event()
        self.requests: list[Request] = []
        self.samples: list[Sample] = []
        self.first_idle: float | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process and begin to send."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "sglang_adaptive.benchmarks.load_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended: said by ``finished``
            self._process.stdin.write(len(self._job).to_bytes(8, "little") + self._job)
            await self._process.stdin.drain()
        self.finished = asyncio.create_task(self._follow(self._process))

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            if line == DECODING:
                self.decoding.set()
            elif line == RESULT:
                size = int.from_bytes(await process.stdout.readexactly(8), "little")
                outcome = pickle.loads(await process.stdout.readexactly(size))
                self.requests, self.samples, self.first_idle = outcome
                await process.wait()
                return
        raise RuntimeError(f"a process of the load generator ended with status {await process.wait()}")

    def stop(self) -> None:
        """Send nothing more."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(ConnectionError):
                self._process.stdin.write(STOP)

    async def close(self) -> None:
        """Leave nothing running."""
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if hasattr(self, "finished"):
            self.finished.cancel()
            await asyncio.gather(self.finished, return_exceptions=True)
        await self._process.wait()
