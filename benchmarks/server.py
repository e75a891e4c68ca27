"""One server process group: started, waited for, looked at when it fails, and always ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_adaptive.launch.process import free_port

if TYPE_CHECKING:
    from sglang_adaptive.benchmarks.config import Arm, Prepare, Sweep

PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl if os.uname().sysname == "Linux" else None


class ServerFailed(RuntimeError):
    """The server ended or did not get ready; the message carries the end of its log."""


def _die_with_parent() -> None:
    # A sweep that is killed outright must not leave a server on the GPU: the session of its own keeps the server out of
    # reach of whoever ends the sweep's process group.
    if _PRCTL is not None:
        _PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)


class Server:
    """A command that serves HTTP on 127.0.0.1:``port`` and answers /health with 200 when it is ready."""

    def __init__(self, command: Sequence[str], port: int, log: Path, env: Mapping[str, str] | None = None) -> None:
        self.command, self.port, self.log = list(command), port, log
        self.url = f"http://127.0.0.1:{port}"
        self.start_seconds: float | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        with log.open("a") as out:
            out.write(f"$ {' '.join(self.command)}\n")
            out.flush()
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def age(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._began

    def wait_ready(self, timeout: float) -> None:
        """Block until /health answers 200; raises ServerFailed when the process ends, or is not ready ``timeout`` s
        after it was started. It is asked at least once."""
        while True:
            if not self.running():
                raise ServerFailed(f"the server ended with status {self._process.returncode}:\n{self.tail()}")
            if self._healthy():
                self.start_seconds = self.age
                return
            if self.age >= timeout:
                break
            time.sleep(0.5)
        raise ServerFailed(f"the server was not ready after {timeout:g} s:\n{self.tail()}")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return answer.status == 200
        except OSError:
            return False

    def running(self) -> bool:
        """Whether the process that was started still runs."""
        return self._process.poll() is None

    def tail(self, lines: int = 40) -> str:
        """The last ``lines`` lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def pause(self) -> None:
        """Take the idle server's schedulers, which poll, off the CPU."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo ``pause``."""
        self._signal(signal.SIGCONT)

    def stop(self, grace: float = 5.0) -> None:
        """End the whole process group and wait until it is gone: its memory must be free for the next server."""
        self._signal(signal.SIGCONT)
        for order, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 20.0)):
            self._signal(order)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                self._process.poll()
                if not _alive(self._process.pid):
                    return
                time.sleep(0.1)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def for_arm(sweep: Sweep, arm: Arm | Prepare, place: int, log: Path) -> Server:
    """The server of an arm, started: on any free port, or where the sweep names one, 10 above it for each ``place``
    among the arms. A named one must not be another sweep's, whose servers would answer."""
    port = sweep.port + 10 * place if sweep.port else free_port()
    address = ["--host", "127.0.0.1", "--port", str(port)]
    return Server([*sweep.server, *sweep.args, *arm.args, *address], port, log, {**sweep.env, **arm.env})


def _alive(group: int) -> bool:
    """Whether the process group has a member that is no zombie (nobody may be there to reap an orphan's)."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, _, member_of = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(member_of) == group and state != "Z":
                return True
    return False
