"""A whole session on a rented machine: steps with a time each, in order of importance, resumed where it stopped.

A step is a command of the benchmarks, or any other. Status 0 means that it is done, 3 that it stopped for lack of time
and goes on when it is called again; anything else is a failure, which the next step does not mind. ``{out}``,
``{configs}``, ``{python}`` and ``{minutes}`` (what the step may take now) are filled in, and ``$NAME`` from the
environment.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_adaptive.errors import AdaptiveError

INCOMPLETE = 3
LEAST_MINUTES = 0.5
CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Step:
    """One table: ``command`` makes its numbers within ``minutes``, ``then`` shows what there is, done or not."""

    name: str
    command: list[str]
    minutes: float
    env: dict[str, str] = field(default_factory=dict)
    then: list[str] = field(default_factory=list)


def read(path: Path) -> list[Step]:
    """The steps of a session's file. Raises AdaptiveError where a step is incomplete or named like another."""
    data = tomllib.loads(path.read_text())
    try:
        steps = [Step(**item) for item in data["steps"]]
    except (KeyError, TypeError) as error:
        raise AdaptiveError(f"{path} is no session: {error}; see benchmarks/configs/gpu_session.toml.") from None
    if len({step.name for step in steps}) < len(steps):
        raise AdaptiveError(f"{path} gives two steps one name.")
    return steps


class Session:
    """``out`` keeps what is done in session.json, and the output of each step in NAME.log."""

    def __init__(self, steps: list[Step], out: Path, minutes: float) -> None:
        self.steps, self.out = steps, out
        self.state = out / "session.json"
        self.began, self.minutes = time.monotonic(), minutes

    def left(self) -> float:
        """Minutes until this call has to end."""
        return self.minutes - (time.monotonic() - self.began) / 60

    def done(self) -> dict[str, Any]:
        """What earlier calls noted: status and minutes by step."""
        return json.loads(self.state.read_text()) if self.state.exists() else {}

    def filled(self, part: str, minutes: float) -> str:
        """A part of a command, or a value of the environment, with everything filled in. Raises AdaptiveError."""
        names = {"{out}": str(self.out), "{configs}": str(CONFIGS), "{python}": sys.executable}
        for name, value in (*names.items(), ("{minutes}", f"{minutes:.2f}")):
            part = part.replace(name, value)
        filled = os.path.expandvars(part)
        if "$" in filled:
            raise AdaptiveError(f"{filled!r} names a variable that is not set in the environment.")
        return filled

    def command(self, parts: Sequence[str], minutes: float) -> list[str]:
        """What to run: a command of the benchmarks where the first part is one, else the parts as they are."""
        from sglang_adaptive.benchmarks.__main__ import COMMANDS

        filled = [self.filled(part, minutes) for part in parts]
        return [sys.executable, "-m", "sglang_adaptive.benchmarks", *filled] if filled[0] in COMMANDS else filled

    def run(self, *, dry: bool) -> bool:
        """Run what is not done; True when nothing is left. ``dry`` only says what would be run."""
        complete = True
        for step in self.steps:
            if self.done().get(step.name, {}).get("status") == 0:
                continue
            minutes = min(step.minutes, self.left())
            environment = {name: self.filled(value, minutes) for name, value in step.env.items()}
            command = self.command(step.command, minutes)
            named = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
            shown = " ".join([*named, shlex.join(command)])
            print(f"\n== {step.name}, {minutes:.1f} minutes: {shown}", flush=True)
            if dry:
                if step.then:
                    print(f"   then: {shlex.join(self.command(step.then, minutes))}")
                complete = False
                continue
            if minutes < min(LEAST_MINUTES, step.minutes):
                print("   no time left: call again", flush=True)
                return False
            status = self._step(step, command, environment, minutes)
            complete = complete and status == 0
        return complete

    def _step(self, step: Step, command: list[str], environment: dict[str, str], minutes: float) -> int:
        begin = time.monotonic()
        log = self.out / f"{step.name}.log"
        # A command that keeps its time itself ends before; half a minute more for one that does not.
        status = _run(command, {**os.environ, **environment}, log, 60 * minutes + 30)
        if step.then:
            _run(self.command(step.then, minutes), {**os.environ, **environment}, log, 120)
        spent = (time.monotonic() - begin) / 60
        earlier = self.done().get(step.name, {}).get("minutes", 0.0)
        self.state.write_text(
            json.dumps(self.done() | {step.name: {"status": status, "minutes": earlier + spent}}, indent=1)
        )
        words = {0: "done", INCOMPLETE: "not finished, goes on when called again"}
        outcome = words.get(status, f"FAILED with status {status}")
        print(f"== {step.name}: {outcome} after {spent:.1f} minutes", flush=True)
        return status


def _run(command: list[str], environment: dict[str, str], log: Path, seconds: float) -> int:
    """Run, with the output on ours and in ``log``; the status, or INCOMPLETE where it had to be ended."""
    with log.open("a") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        ended = _Deadline(process, seconds)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
        process.wait()
        return INCOMPLETE if ended.late() else process.returncode


class _Deadline:
    """Ends a process that outstays its time: first it may clean up after itself."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        self._process, self._late = process, False
        self._timers = [threading.Timer(seconds, self._end), threading.Timer(seconds + 20, process.kill)]
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def _end(self) -> None:
        self._late = True
        self._process.terminate()

    def late(self) -> bool:
        """Stop watching; whether the time was over."""
        for timer in self._timers:
            timer.cancel()
        return self._late


def main(argv: Sequence[str]) -> int:
    """Run the steps of a session within a time, and go on where an earlier call stopped. Status 3: steps are left."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks session", description=main.__doc__)
    parser.add_argument("--config", type=Path, required=True, help="see benchmarks/configs/gpu_session.toml")
    parser.add_argument("--out", type=Path, required=True, help="everything that is measured goes there")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for this call")
    parser.add_argument("--only", nargs="+", help="only these steps")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be run")
    arguments = parser.parse_args(argv)
    steps = read(arguments.config)
    unknown = set(arguments.only or ()) - {step.name for step in steps}
    if unknown:
        parser.error(f"no step is called {', '.join(sorted(unknown))}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = [step for step in steps if not arguments.only or step.name in arguments.only]
    session = Session(chosen, arguments.out.absolute(), arguments.minutes)
    complete = session.run(dry=arguments.dry_run)
    return 0 if complete or arguments.dry_run else INCOMPLETE
