"""A process of the load generator: its job comes on stdin, its outcome goes to stdout (see shares.RemoteShare)."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading

from sglang_adaptive.benchmarks.shares import DECODING, RESULT, STOP
from sglang_adaptive.benchmarks.streams import Streams


def _listen(loop: asyncio.AbstractEventLoop, streams: Streams) -> None:
    """Pass the order to stop on; a parent that is gone ends this process."""
    if sys.stdin.buffer.readline() == STOP:
        loop.call_soon_threadsafe(streams.stop)
    else:
        os._exit(1)


async def _run() -> None:
    source, out = sys.stdin.buffer, sys.stdout.buffer
    url, load, first, stride = pickle.loads(source.read(int.from_bytes(source.read(8), "little")))

    def say_decoding() -> None:
        out.write(DECODING)
        out.flush()

    streams = Streams(url, load, first, stride, say_decoding)
    threading.Thread(target=_listen, args=(asyncio.get_running_loop(), streams), daemon=True).start()
    await streams.run()
    outcome = pickle.dumps((streams.requests, streams.samples, streams.first_idle))
    out.write(RESULT + len(outcome).to_bytes(8, "little") + outcome)
    out.flush()


if __name__ == "__main__":
    asyncio.run(_run())
    os._exit(0)  # the listening thread still waits
