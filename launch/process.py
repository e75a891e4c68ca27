"""A server as a child process: started on a free port, watched, and stopped with all its descendants."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Self

import psutil

from sglang_adaptive.launch.client import Client

TAIL_LINES = 40
_REASON = re.compile(r"^(?:\[[^]]*\] )?((?:[\w.]*(?:Error|Exception|Interrupt|Exit)|error)\b.*)$", re.MULTILINE)
STOP_SECONDS = 15.0
_LEAST_PORT = 10_000
_TAKEN = "error while attempting to bind on address"  # the host hangs after it has said so


class ServerFailed(Exception):
    """The server ended, or was not ready in time; the message holds the end of its log."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now, and that no connection will be given meanwhile.

    A server listens half a minute after it was started. The system hands the ports of its ephemeral range to whoever
    connects to something, so one of those may be taken by then: the port is drawn from below that range.
    """
    for port in random.SystemRandom().sample(range(_LEAST_PORT, _first_ephemeral_port()), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(errno.EADDRINUSE, f"no free port of 127.0.0.1 was found below {_first_ephemeral_port()}")


def _first_ephemeral_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32768
    return first if first >= 2 * _LEAST_PORT else 32768


class ServerProcess:
    """``python -m sglang.launch_server`` with ``arguments``; ``with`` stops it whatever happens.

    Attributes:
        client: talks to it.
        log: file with its output.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.log = log
        self.port = port or free_port()
        self.client = Client(f"http://127.0.0.1:{self.port}")
        self._command = [python, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(self.port)]
        self._command += arguments
        self._environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def start(self) -> None:
        """Start it without waiting. Its processes form a session of their own, so that Ctrl-C reaches only us."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._output = open(self.log, "wb")  # noqa: SIM115 (the child writes to it until stop)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
        )

    def wait_ready(self, timeout_seconds: float = 600.0, beat: Callable[[float], None] | None = None) -> float:
        """Wait until it serves; returns the seconds that took.

        ``beat`` is called with the seconds so far, twice a second. Raises ServerFailed as soon as the process ends or
        finds its port taken, or after ``timeout_seconds``.
        """
        begin = time.monotonic()
        while True:
            elapsed = time.monotonic() - begin
            self.check_alive()
            healthy = self.client.healthy()
            if _TAKEN in self.log_text():  # then it is the other one that answers
                raise ServerFailed(f"another process has taken port {self.port}{self._evidence()}")
            if healthy:
                return elapsed
            if elapsed > timeout_seconds:
                raise ServerFailed(f"the server was not ready after {timeout_seconds:.0f} s{self._evidence()}")
            if beat is not None:
                beat(elapsed)
            time.sleep(0.5)

    def check_alive(self) -> None:
        """Raises ServerFailed when the process has ended."""
        if self._process is None or self._process.poll() is not None:
            code = None if self._process is None else self._process.returncode
            raise ServerFailed(f"the server ended with exit status {code}{self._evidence()}")

    def wait_exit(self, timeout_seconds: float) -> int:
        """The exit status of a server that is expected to end by itself. Raises subprocess.TimeoutExpired."""
        assert self._process is not None, "start it first"
        return self._process.wait(timeout_seconds)

    def _evidence(self) -> str:
        reasons = _REASON.findall(self.log_text())
        return f"{': ' + reasons[-1][:500] if reasons else ''}\nThe end of {self.log}:\n{self.log_tail()}"

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of the log, each cut to 300 characters."""
        return "\n".join(f"  | {line[:300]}" for line in self.log_text().splitlines()[-lines:])

    def processes(self) -> list[psutil.Process]:
        """Every living process of the server: its session's, and its descendants that left the session."""
        if self._process is None:
            return []
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            found = {process.pid: process for process in [root, *root.children(recursive=True)]}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(process.pid) == self._process.pid:
                    found[process.pid] = process
        return [process for process in found.values() if _lives(process)]

    def stop(self) -> None:
        """Ask it to end, and end what is left after 15 seconds. No process of it lives afterwards."""
        if self._process is None:
            return
        processes = self.processes()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        psutil.wait_procs(processes, timeout=STOP_SECONDS)
        left = {process.pid: process for process in [*processes, *self.processes()] if _lives(process)}
        for process in left.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left.values(), timeout=STOP_SECONDS)
        self._process.wait()
        self._process = None
        if self._output is not None:
            self._output.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
