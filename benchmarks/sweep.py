"""Compares server set-ups over concurrency: same prompts, arms alternated, repeats, resumable, within a time."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_adaptive.benchmarks import config, machine, prompts, trace_syncs
from sglang_adaptive.benchmarks.config import Arm, Prepare, Sweep
from sglang_adaptive.benchmarks.load import Load, measure, post, server_state
from sglang_adaptive.benchmarks.plan import Cell, Clock, Rows, Stage, remaining, stages
from sglang_adaptive.benchmarks.server import Server, ServerFailed, for_arm
from sglang_adaptive.benchmarks.steptime import capture_trace
from sglang_adaptive.errors import AdaptiveError

INCOMPLETE = 3


class OutOfTime(Exception):
    """The time is used up; what was measured is on disk."""


class Run:
    """One invocation: measures what is left, until done or out of time."""

    def __init__(self, sweep: Sweep, out: Path, logs: Path, prompt_set: prompts.Prompts, stop_after: float) -> None:
        self.sweep, self.out, self.logs, self.prompts = sweep, out, logs, prompt_set
        self.rows = Rows(out / "results.jsonl")
        self.clock = Clock(sweep.start_estimate)
        self.began = time.monotonic()
        self.stop_after = stop_after
        self.seconds = sweep.seconds
        self.rest: list[Stage] = []
        self.total = sum(len(stage.cells) for stage in stages(sweep))

    def time_left(self) -> float:
        """Seconds until this invocation has to end."""
        return self.stop_after - (time.monotonic() - self.began)

    def say(self, text: str) -> None:
        """One line of progress, with the seconds since the start and an estimate of those left."""
        left = sum(len(stage.cells) for stage in self.rest)
        estimate = self.clock.left(self.rest, self.seconds, starting=False) if self.rest else 0.0
        elapsed = time.monotonic() - self.began
        print(f"[{elapsed:5.0f} s] {self.total - left}/{self.total} {text} (about {estimate:.0f} s left)", flush=True)

    def run(self, *, fit: bool, retry_failed: bool) -> bool:
        """Measure; True when nothing is left. ``fit`` shortens all windows evenly to fit the time."""
        done, traced = (find(retry_failed=retry_failed) for find in (self.rows.done, self.rows.traced))
        self.rest = remaining(stages(self.sweep), done, traced)
        if fit:
            self.seconds = self.clock.window(self.rest, self.time_left(), self.sweep.seconds, self.sweep.min_seconds)
        self.say(f"{self.sweep.name}: windows of {self.seconds:.1f} s")
        try:
            while self.rest:
                self._stage(self.rest[0])
                self.rest = self.rest[1:]
        except OutOfTime:
            self.say("out of time: the same command goes on from here")
            return False
        self.say("complete")
        return True

    def _stage(self, stage: Stage) -> None:
        self._check_time(self.clock.start + self.seconds + self.clock.around)
        begin = time.monotonic()
        servers: dict[str, Server] = {}
        try:
            usable = [arm for arm in stage.arms if self._prepared(arm, stage)]
            # Ours measures step costs while it starts: by then the others must be up and idle, another of ours too.
            others = [arm for arm in usable if arm.role != "ours"]
            for wave in (others, *([arm] for arm in usable if arm.role == "ours")):
                for arm in wave:
                    servers[arm.name] = self._start(arm, arm.name, self.sweep.arms.index(arm))
                for arm in wave:
                    self._ready(arm, servers, stage)
            self.clock.started(time.monotonic() - begin)
            for cell in stage.cells:
                if cell.arm in servers:
                    self._check_time(self.seconds + self.clock.around)
                    self._cell(cell, servers, stage)
                self.rest[0] = dataclasses.replace(stage, cells=self.rest[0].cells[1:])
            for arm, concurrency in stage.traces:
                if arm in servers:
                    self._check_time(self.clock.trace)
                    self._trace(arm, concurrency, servers[arm])
        finally:
            for server in servers.values():
                server.stop()

    def _check_time(self, needed: float) -> None:
        if needed > self.time_left():
            raise OutOfTime

    def _start(self, arm: Arm | Prepare, name: str, place: int) -> Server:
        return for_arm(self.sweep, arm, place, self.logs / f"{name}.log")

    def _wait(self, server: Server) -> None:
        """Wait for the server, but not beyond this invocation's time: then it has not failed."""
        try:
            # The server counts from its start, which for one of a group may be long ago.
            server.wait_ready(min(self.sweep.start_timeout, server.age + self.time_left()))
        except ServerFailed:
            self._check_time(0.0)
            raise

    def _prepared(self, arm: Arm, stage: Stage) -> bool:
        """Whether the file that the arm needs is there, after making it where it is not."""
        need = arm.prepare
        if need is None or Path(need.file).exists():
            return True
        self.say(f"{arm.name}: making {need.file}")
        server = self._start(need, arm.name, len(self.sweep.arms))
        try:
            self._wait(server)
            filled = [part.replace("{url}", server.url).replace("{file}", need.file) for part in need.command]
            done = subprocess.run(filled, capture_output=True, text=True, timeout=need.timeout)
            (self.logs / f"{arm.name}.prepare.log").write_text(done.stdout + done.stderr)
            if done.returncode or not Path(need.file).exists():
                raise ServerFailed(f"{shlex.join(filled)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        except (ServerFailed, subprocess.TimeoutExpired) as error:
            self._failed(arm, stage, str(error))
            return False
        finally:
            server.stop()
        return True

    def _ready(self, arm: Arm, servers: dict[str, Server], stage: Stage) -> None:
        """Wait for the arm's server and warm it up: kernels are compiled when they are first used."""
        server = servers[arm.name]
        try:
            self._wait(server)
            self._check_acceptance(arm, server)
            ends = {min(self.sweep.concurrency), max(self.sweep.concurrency)}
            seconds = self.sweep.warmup_seconds if arm.warmup_seconds is None else arm.warmup_seconds
            for concurrency in self.sweep.warmup_concurrency or sorted(ends):
                asyncio.run(measure(server.url, self._load(concurrency, -1, seconds / 2)))
        except (ServerFailed, RuntimeError) as error:
            servers.pop(arm.name).stop()
            self._failed(arm, stage, f"{error}\n{server.tail()}")
            return
        self.say(f"{arm.name}: up after {server.start_seconds:.0f} s")
        self._pause(server)

    def _check_acceptance(self, arm: Arm, server: Server) -> None:
        """Raise ServerFailed where a drafting server and the sweep differ on whether acceptance is simulated."""
        if arm.role != "none":
            found = asyncio.run(server_state(server.url)).get("bench_acceptance")
            if bool(found) != bool(self.sweep.acceptance):
                raise ServerFailed(
                    f"the server reports simulated acceptance {found}, the sweep {self.sweep.acceptance}"
                )

    def _failed(self, arm: Arm, stage: Stage, reason: str) -> None:
        print(f"{arm.name} failed: {reason}", file=sys.stderr, flush=True)
        done = self.rows.done(retry_failed=True)
        for cell in stage.cells:
            if cell.arm == arm.name and cell not in done:
                self.rows.append({"kind": "failure", **cell._asdict(), "reason": reason[-4000:]})
        for name, concurrency in stage.traces:
            if name == arm.name:
                failed = reason.splitlines()[0]
                self.rows.append({"kind": "trace", "arm": name, "concurrency": concurrency, "failed": failed})

    def _cell(self, cell: Cell, servers: dict[str, Server], stage: Stage) -> None:
        server = servers[cell.arm]
        arm = next(arm for arm in self.sweep.arms if arm.name == cell.arm)
        self._resume(server)
        begin = time.monotonic()
        try:
            row = asyncio.run(self._measure(server.url, cell))
        except RuntimeError as error:
            servers.pop(cell.arm).stop()
            self._failed(arm, stage, f"{error}\n{server.tail()}")
            return
        row["server_start_seconds"] = server.start_seconds
        self.rows.append({"kind": "cell", **cell._asdict(), **row, "at": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        self.clock.measured(time.monotonic() - begin - self.seconds)
        self._pause(server)
        accepted = f", accepted {row['accept_length']:.2f}" if row["accept_length"] else ""
        verified = f", verified {row['verify_length']:.2f}" if row["verify_length"] else ""
        errors = f", {row['errors']} ERRORS" if row["errors"] else ""
        self.say(
            f"{cell.arm} c={cell.concurrency} r{cell.repeat}: {row['tok_s']:.0f} tok/s, "
            f"{row['tok_s_user']:.0f} tok/s/user{accepted}{verified}{errors}"
        )

    async def _measure(self, url: str, cell: Cell) -> dict[str, Any]:
        await post(f"{url}/flush_cache")  # every arm prefills what it is sent
        seconds = None if self.sweep.batches else self.seconds
        return await measure(url, self._load(cell.concurrency, cell.repeat, seconds))

    def _load(self, concurrency: int, repeat: int, seconds: float | None) -> Load:
        return Load(
            concurrency=concurrency,
            prompts=self.prompts,
            seconds=seconds,
            requests=concurrency if seconds is None else None,
            output_tokens=tuple(self.sweep.output_tokens),
            temperature=self.sweep.temperature,
            stream_interval=self.sweep.stream_interval,
            seed=f"{self.sweep.seed}/{concurrency}/{repeat}",
        )

    def _trace(self, arm: str, concurrency: int, server: Server) -> None:
        assert self.sweep.trace is not None
        self._resume(server)
        load = dataclasses.replace(self._load(concurrency, 0, 120.0), output_tokens=(1024, 1024))
        folder = self.out.absolute() / "traces" / f"{arm}-c{concurrency}"
        try:
            path = asyncio.run(capture_trace(server.url, load, self.sweep.trace.steps, folder, timeout=60.0))
            numbers: dict[str, Any] = trace_syncs.per_step(trace_syncs.load_events(path))
            self.say(f"{arm} c={concurrency}: traced, {numbers['syncs_total']:.1f} synchronising calls per step")
        except (RuntimeError, AdaptiveError) as error:
            numbers = {"failed": str(error)}
        self.rows.append({"kind": "trace", "arm": arm, "concurrency": concurrency, **numbers})
        self._pause(server)

    def _pause(self, server: Server) -> None:
        if self.sweep.pause_idle and self.sweep.resident > 1:
            server.pause()

    def _resume(self, server: Server) -> None:
        if self.sweep.pause_idle and self.sweep.resident > 1:
            server.resume()


def main(argv: Sequence[str]) -> int:
    """Measure every arm at every concurrency, and go on where an earlier run stopped. Status 3: cells are left."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks sweep", description=main.__doc__)
    parser.add_argument("--config", type=Path, required=True, help="TOML or JSON; see benchmarks/configs")
    parser.add_argument("--out", type=Path, required=True, help="results.jsonl and run.json go there")
    parser.add_argument("--logs", type=Path, help="server logs go there (default: OUT/logs)")
    parser.add_argument("--minutes", type=float, help="shorten all windows evenly so that what is left takes so long")
    parser.add_argument("--stop-after", type=float, help="end after so many minutes without shortening anything")
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--concurrency", type=int, nargs="+", help="only these")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--seconds", type=float, help="length of a cell's steady window")
    parser.add_argument("--retry-failed", action="store_true", help="try again what failed in an earlier run")
    arguments = parser.parse_args(argv)
    sweep = _narrowed(config.read(arguments.config), arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    logs = arguments.logs or arguments.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    _note_run(arguments.out, sweep, argv)
    limits = [60 * minutes for minutes in (arguments.minutes, arguments.stop_after) if minutes is not None]
    prompt_set = prompts.make(sweep.prompts, arguments.config.parent)
    run = Run(sweep, arguments.out, logs, prompt_set, min(limits, default=float("inf")))
    # A terminated sweep ends its servers on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    complete = run.run(fit=arguments.minutes is not None, retry_failed=arguments.retry_failed)
    return 0 if complete else INCOMPLETE


def _narrowed(sweep: Sweep, arguments: argparse.Namespace) -> Sweep:
    changes: dict[str, Any] = {
        name: value for name in ("concurrency", "repeats", "seconds") if (value := getattr(arguments, name)) is not None
    }
    if arguments.arms:
        changes["arms"] = [arm for arm in sweep.arms if arm.name in arguments.arms]
        if len(changes["arms"]) < len(set(arguments.arms)):
            sys.exit(f"--arms must be some of {', '.join(arm.name for arm in sweep.arms)}")
    return dataclasses.replace(sweep, **changes)


def _note_run(out: Path, sweep: Sweep, argv: Sequence[str]) -> None:
    """Add this invocation to run.json, beside the machine and the arms."""
    path = out / "run.json"
    note = json.loads(path.read_text()) if path.exists() else {"invocations": [], "arms": {}}
    note["invocations"].append(
        {"command": shlex.join(["sweep", *map(str, argv)]), "at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    )
    note["arms"] |= {arm.name: dataclasses.asdict(arm) for arm in sweep.arms}
    settings = dataclasses.asdict(sweep)
    del settings["arms"]
    if sweep.acceptance:
        from sglang_adaptive.benchmarks import acceptance  # torch: for those who need it

        asked = acceptance.read(Path(sweep.acceptance))
        note["acceptance"] = asked.describe(min(len(kind.rates) for kind in asked.kinds))
    path.write_text(json.dumps(note | {"machine": machine.describe(), "sweep": settings}, indent=1))
