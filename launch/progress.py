"""Progress for people: every line carries the seconds since the start, and long waits say that they go on."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

_START = time.monotonic()
BEAT_SECONDS = 10.0


def say(text: str) -> None:
    """Print one line to standard error, with the seconds since this process loaded the module."""
    print(f"[{time.monotonic() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Say that ``what`` begins and ends, and every 10 seconds in between that it goes on."""
    begin, done = time.monotonic(), threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_SECONDS):
            say(f"{what} ... {time.monotonic() - begin:.0f} s")

    say(f"{what} ...")
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    say(f"{what}: done in {time.monotonic() - begin:.1f} s")
