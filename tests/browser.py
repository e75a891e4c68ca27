"""A headless Chromium for tests, driven over its DevTools pipe: no package is needed besides the browser."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome-headless-shell",
)
VARIABLE = "ADAPTIVE_BROWSER"


def find() -> str | None:
    """A Chromium on this machine: the one that ``ADAPTIVE_BROWSER`` names, or one on PATH."""
    named = os.environ.get(VARIABLE)
    return named or next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of ``executable``, inside a ``with`` block.

    Attributes:
        problems: messages of the page's console and log, and uncaught exceptions.
        requested: every URL that the page asked for.
    """

    def __init__(self, executable: str, width: int = 1280, height: int = 900, timeout_seconds: float = 60.0) -> None:
        self._executable, self._size, self._timeout = executable, (width, height), timeout_seconds
        self.problems: list[str] = []
        self.requested: list[str] = []
        self._number = 0
        self._buffer = b""
        self._session: str | None = None

    def __enter__(self) -> Self:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        down, self._write = os.pipe()
        self._read, up = os.pipe()

        def wire() -> None:
            # The browser reads commands from descriptor 3 and writes answers to 4. Neither end may be there already.
            a, b = os.dup(down), os.dup(up)
            a, b = (os.dup2(fd, 10 + index, inheritable=True) for index, fd in enumerate((a, b)))
            os.dup2(a, 3, inheritable=True)
            os.dup2(b, 4, inheritable=True)

        width, height = self._size
        self._process = subprocess.Popen(
            [
                self._executable,
                "--headless",
                "--remote-debugging-pipe",
                "--no-sandbox",  # CI runs as root, where the sandbox refuses to start
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                f"--window-size={width},{height}",
                f"--user-data-dir={self._profile.name}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=wire,
            close_fds=False,
            start_new_session=True,
        )
        os.close(down)
        os.close(up)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a DevTools command. Raises RuntimeError for an error, TimeoutError after the time-out."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def open(self, path: Path) -> None:
        """Load a file and wait until it is drawn."""
        self.call("Page.navigate", url=path.absolute().as_uri())
        while self.evaluate("document.readyState") != "complete":
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, whatever the page's policy says."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def screenshot(self, path: Path) -> Path:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else None
            if part is None:
                raise TimeoutError(f"the browser did not answer within {self._timeout:.0f} s")
            if not part:
                raise RuntimeError(f"the browser ended with exit status {self._process.wait()}")
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded":
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
