"""``python -m sglang_adaptive top URL``: what a running server decides, live in the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.observe.fetch import Snapshot, base_url, snapshot
from sglang_adaptive.observe.view import Sums

MISSING = "The live view needs rich, which is not installed: run pip install rich."


def main(argv: Sequence[str]) -> int:
    """Show the view until Ctrl-C; with ``--once`` print one frame. Raises AdaptiveError for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive top", description=__doc__)
    parser.add_argument("url", metavar="URL", help="of the server, http://127.0.0.1:30000 for example")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two looks (default: 2)")
    parser.add_argument("--api-key", help="of the server, where it was started with one")
    options = parser.parse_args(argv)
    if not 0.1 <= options.interval <= 3600:
        raise AdaptiveError(f"--interval is {options.interval:g}, but it must be from 0.1 to 3600 seconds.")
    try:
        from rich.console import Console

        from sglang_adaptive.observe.frame import frame
    except ImportError:
        raise AdaptiveError(MISSING) from None
    url = base_url(options.url)

    def ask() -> Snapshot:
        return snapshot(url, options.api_key)

    console = Console()
    try:
        if options.once:
            first = ask()
            time.sleep(options.interval)
            second = ask()
            console.print(frame(url, second, Sums.of(second).since(Sums.of(first))))
        else:
            _watch(console, url, ask, options.interval, frame)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        sys.stderr.close()  # whoever read us has seen enough; nothing more is to be said
    return 0


def _watch(console: Any, url: str, ask: Callable[[], Snapshot], interval: float, frame: Callable[..., Any]) -> None:
    """Redraw until interrupted. A server that stops answering is waited for: it may be starting again."""
    from rich.live import Live

    last = ask()
    with Live(frame(url, last, None), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        lost: float | None = None
        while True:
            time.sleep(interval)
            try:
                now = ask()
            except AdaptiveError as error:
                lost = time.monotonic() if lost is None else lost
                live.update(
                    frame(url, last, None, f"{error} Waiting since {time.monotonic() - lost:.0f} s."), refresh=True
                )
                continue
            lost = None
            live.update(frame(url, now, Sums.of(now).since(Sums.of(last))), refresh=True)
            last = now
