"""Real servers for end-to-end tests.

The first process of ``sglang.launch_server`` and its children are forks of the warm interpreter. Ranks that have to
agree, other entry points, a few tests of this one (``fresh``) and all on a machine with a GPU start as they always do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil
from warm_python import warm_python

from sglang_adaptive import ALGORITHM
from sglang_adaptive.launch.client import Prompt
from sglang_adaptive.launch.process import ServerProcess

_NUMBERS = itertools.count()
_MODULE = "sglang.launch_server"
# CUDA does not survive a fork, and importing the host initialises it.
_CUDA = any(Path("/dev").glob("nvidia[0-9]*"))


def speculative(draft: Path, algorithm: str = ALGORITHM) -> list[str]:
    """The arguments that a user gives for ``draft``."""
    return ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft)]


class _Process(ServerProcess):
    """A server whose command, if it is that of ``sglang.launch_server``, is run by a fork of the warm interpreter."""

    fresh = False

    def start(self) -> None:
        if self.fresh or _CUDA or self._command[1:3] != ["-m", _MODULE]:
            super().start()
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        self._process = warm_python().start(
            self._command[3:], self.log, self.log, module=_MODULE, environment=self._environment
        )

    def stop(self) -> None:
        """End it at once: asked to end, the host looks up every five seconds only. The quickstart's test asks."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                # That one ends with the others, and then gives back what they shared.
                if "resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
        super().stop()


class Server(_Process):
    """Serves ``model`` inside a ``with`` block: ready at its start, without a trace at its end.

    ``arguments`` are further ones of ``sglang.launch_server``. The output goes to a file of its own in ``log_dir``.
    """

    def __init__(
        self,
        model: Path,
        *arguments: str,
        log_dir: Path,
        environment: dict[str, str] | None = None,
        ready_seconds: float = 600.0,
    ) -> None:
        log = log_dir / f"server-{next(_NUMBERS)}.log"
        # Two halves of the tests share two cores (run.sh): a thread each is faster, and no waiting for the other one.
        threads = os.environ.get("ADAPTIVE_TEST_THREADS")
        environment = {**({"OMP_NUM_THREADS": threads} if threads else {}), **(environment or {})}
        super().__init__(["--model-path", str(model), *arguments], log, environment=environment)
        self._ready_seconds = ready_seconds

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready(self._ready_seconds)
        except BaseException:
            self.stop()
            raise
        return self

    def generate(self, prompts: Sequence[Prompt], max_new_tokens: int = 64, **options: Any) -> list[dict[str, Any]]:
        """All prompts at the same time; see ``Client.generate``."""
        return self.client.generate(prompts, max_new_tokens, **options)

    def greedy_ids(self, prompts: Sequence[Prompt], max_new_tokens: int = 64) -> list[list[int]]:
        """The token ids that follow each prompt at temperature 0, as many as asked whatever they are."""
        answers = self.generate(prompts, max_new_tokens, temperature=0.0, ignore_eos=True)
        return [answer["output_ids"] for answer in answers]

    def chat(self, questions: Sequence[str], max_tokens: int = 64, **options: Any) -> list[dict[str, Any]]:
        return self.client.chat(questions, max_tokens, **options)

    def server_info(self) -> dict[str, Any]:
        return self.client.server_info()

    def adaptive_state(self) -> dict[str, Any]:
        """What our worker reports of the first data-parallel rank. Raises IndexError where it does not run."""
        return self.client.adaptive_states()[0]

    def metrics(self) -> dict[str, float]:
        return self.client.metrics()

    def free_kv_tokens(self, timeout_seconds: float = 30.0) -> int:
        """Token slots of the KV pool that no request holds, read while the server is idle.

        Cached prefixes count as free, as they can be evicted. Raises TimeoutError when requests still run.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            loads = self.client.loads()
            if not any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in loads):
                return sum(load["max_total_num_tokens"] - load["num_used_tokens"] for load in loads)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server is still busy after {timeout_seconds:.0f} s: {loads}")
            time.sleep(0.2)


def failed_start(
    model: Path,
    *arguments: str,
    log_dir: Path,
    environment: dict[str, str] | None = None,
    timeout_seconds: float = 300.0,
    fresh: bool = False,
) -> tuple[int, str]:
    """Exit status and output of a server that must not start. Raises subprocess.TimeoutExpired if it does not end.

    ``fresh``: in an interpreter of its own from the beginning.
    """
    log = log_dir / f"server-{next(_NUMBERS)}.log"
    process = _Process(["--model-path", str(model), *arguments], log, environment=environment)
    process.fresh = fresh
    with process:
        return process.wait_exit(timeout_seconds), process.log_text()
