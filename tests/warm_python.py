"""Processes of their own that need not import the host: forks of an interpreter that has imported it and nothing more.

Importing the host takes a dozen seconds of CPU time. A fork has its modules, and none of the state that arguments,
plugins and patches bring.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warm_children import become_spawned, begin_like_an_interpreter, keep_spares

# What the host's server imports of others; their order among the host's own modules does not matter.
LIBRARIES = (
    "aiohttp.web",
    "compressed_tensors.config",
    "fastapi",
    "flashinfer",
    "gguf",
    "openai.types.responses",
    "pydantic.v1",
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.compile_fx",
    "triton_kernels.tensor",
    "uvicorn",
    "xgrammar",
)


class Fork:
    """A running fork; the part of ``subprocess.Popen`` that is needed of one."""

    def __init__(self) -> None:
        self.pid, self.returncode = 0, None
        self._begun, self._ended = threading.Event(), threading.Event()

    def hear(self, what: str, number: int) -> None:
        if what == "pid":
            self.pid = number
            self._begun.set()
        else:
            self.returncode = number
            self._ended.set()

    def begun(self) -> Fork:
        if not self._begun.wait(300):
            raise TimeoutError("the warm interpreter did not fork within 300 s")
        if not self.pid:
            raise RuntimeError("the warm interpreter ended before it forked")
        return self

    def lose(self) -> None:
        """The warm interpreter is gone: nobody will say how this fork ends."""
        if self.returncode is None:
            self.returncode = -signal.SIGKILL
        self._begun.set()
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a fork of the warm interpreter", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


class WarmPython:
    """Runs Python as ``python -c`` or ``python -m`` would."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        # OpenMP reads its policy when it is loaded: what a server's platform asks for comes too late for a fork, and
        # threads that spin at a barrier starve the other servers.
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self._forks: dict[int, Fork] = {}
        self._numbers = itertools.count()
        threading.Thread(target=self._listen, daemon=True).start()

    def start(
        self,
        arguments: Sequence[str],
        output: Path,
        errors: Path,
        *,
        module: str | None = None,
        code: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> Fork:
        """Start ``module`` or ``code`` with these arguments and this whole environment, in a session of its own.

        It adds to the files ``output`` and ``errors``, which may be the same.
        """
        number = next(self._numbers)
        fork = self._forks[number] = Fork()
        request = {
            "number": number,
            "argv": [module or "-c", *arguments],
            "module": module,
            "code": code,
            "environment": dict(os.environ) if environment is None else environment,
            "folder": os.getcwd(),
            "files": [str(output), str(errors)],
        }
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return fork.begun()

    def _listen(self) -> None:
        for line in self._process.stdout:
            # What a library prints while it is imported comes here, too.
            with contextlib.suppress(ValueError, KeyError):
                number, what, value = line.decode().split()
                self._forks[int(number)].hear(what, int(value))
        for fork in list(self._forks.values()):
            fork.lose()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)


@functools.cache
def warm_python() -> WarmPython:
    """The one of this test run."""
    warm = WarmPython()
    atexit.register(warm.close)
    return warm


def run_code(code: str, arguments: Sequence[str], environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Exit status, output and errors of ``code``. Raises subprocess.TimeoutExpired after five minutes."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        status = warm_python().start(arguments, output, errors, code=code, environment=environment).wait(300)
        return status, output.read_text(errors="replace"), errors.read_text(errors="replace")


# ----------------------------------------------------------------------------------------- inside the warm interpreter
def _requests() -> dict[str, Any] | None:
    """Fork for each request until the input ends, and return None; in a fork, return its request."""
    numbers: dict[int, int] = {}
    rest = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.1)
        while numbers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            _say(numbers.pop(pid), "exit", os.waitstatus_to_exitcode(status))
        if not ready:
            continue
        piece = os.read(0, 1 << 20)
        if not piece:
            for pid in numbers:  # whoever asked for them is gone
                os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            return None
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                os.setsid()
                return request
            numbers[pid] = request["number"]
            _say(request["number"], "pid", pid)


def _say(number: int, what: str, value: int) -> None:
    os.write(1, f"{number} {what} {value}\n".encode())


def _become(request: dict[str, Any]) -> None:
    os.chdir(request["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in zip((1, 2), request["files"], strict=True):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = request["argv"]
    sys.path[0] = request["folder"]
    begin_like_an_interpreter()
    if request["module"]:
        spawned = keep_spares(request["argv"])
        if spawned is not None:
            become_spawned(spawned)
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    else:
        exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    # Of the host, what sglang.launch_server imports before it loads the plugins, and no more: what the plugins change
    # is changed at the same point of the same order.
    import sglang.srt.arg_groups.overrides
    import sglang.srt.plugins
    import sglang.srt.server_args
    import sglang.srt.utils.common  # noqa: F401

    for library in LIBRARIES:
        importlib.import_module(library)
    gc.collect()
    gc.freeze()  # or the collector of each fork would copy all of it
    wanted = _requests()
    if wanted is not None:
        _become(wanted)
