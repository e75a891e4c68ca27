"""How long a decode step takes on running servers, and profiler traces of such steps."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from sglang_adaptive.benchmarks import config, trace_syncs
from sglang_adaptive.benchmarks.config import Sweep
from sglang_adaptive.benchmarks.load import Load, Runner, measure, post
from sglang_adaptive.benchmarks.prompts import Prompts, SyntheticPrompts, make, read_packed
from sglang_adaptive.benchmarks.server import Server, ServerFailed, for_arm
from sglang_adaptive.benchmarks.stats import median, spread
from sglang_adaptive.errors import AdaptiveError

# One chunk at the start and one at the end of a request: streaming is not what is timed.
ONE_CHUNK = 1 << 20


async def step_time(url: str, load: Load) -> dict[str, Any]:
    """``ms_per_token`` of one request, ``ms_per_step`` and ``accept_length`` under ``load``."""
    cell = await measure(url, load)
    return {
        "ms_per_token": 1e3 / cell["tok_s_user"],
        "ms_per_step": cell["ms_per_step"],
        "accept_length": cell["accept_length"],
        "errors": cell["errors"],
    }


async def capture_trace(url: str, load: Load, steps: int, folder: Path, timeout: float = 180.0) -> Path:
    """Profile ``steps`` steps of the server under ``load`` (which must outlast them) and return the trace's file.

    The server writes the file itself: ``folder`` must be on its machine. Raises RuntimeError where none comes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = set(folder.glob("*.trace.json.gz"))
    running = asyncio.create_task(Runner(url, load).run())
    try:
        await asyncio.sleep(1.0)
        request = {
            "output_dir": str(folder),
            "num_steps": steps,
            "activities": ["CPU", "GPU"],
            "with_stack": False,
            "record_shapes": False,
        }
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as http:
            async with http.post(f"{url}/start_profile", json=request) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"/start_profile answered {answer.status}: {(await answer.text())[:200]}")
            # The server ends the profile by its forward counter, which only runs while requests decode.
            if path := await _written(folder, known, running, timeout):
                return path
            async with http.post(f"{url}/stop_profile"):
                pass
            if path := await _written(folder, known, running, 20.0):
                return path
        raise RuntimeError(f"no trace of {url} came within {timeout:g} s; does its machine see {folder}?")
    except (TimeoutError, aiohttp.ClientError) as error:
        raise RuntimeError(f"{url} did not survive the profiler: {type(error).__name__}") from error
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        with contextlib.suppress(RuntimeError):
            await post(f"{url}/abort_request", {"rid": "", "abort_all": True})


async def _written(folder: Path, known: set[Path], load: asyncio.Task[None], timeout: float) -> Path | None:
    """The new trace once it has stopped growing, or None when the load or the time is over."""
    size, deadline = -1, time.monotonic() + timeout
    while time.monotonic() < deadline:
        new = [path for path in folder.glob("*.trace.json.gz") if path not in known]
        if new and new[0].stat().st_size == size > 0:
            return new[0]
        size = new[0].stat().st_size if new else -1
        if load.done() and not new:
            return None
        await asyncio.sleep(1.0)
    return None


def compare(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Median and spread over rounds per server, and the step time relative to the first server's."""
    result: dict[str, dict[str, Any]] = {}
    for name, cells in rounds.items():
        per_step = [cell["ms_per_step"] for cell in cells]
        result[name] = {
            "ms_per_token": median([cell["ms_per_token"] for cell in cells]),
            "ms_per_step": median(per_step),
            "spread": spread(per_step),
            "accept_length": median([cell["accept_length"] for cell in cells if cell["accept_length"]]),
            "errors": sum(cell["errors"] for cell in cells),
        }
    first = next(iter(result.values()))["ms_per_step"]
    for row in result.values():
        row["relative"] = row["ms_per_step"] / first
    return result


async def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    prompts: Prompts = arguments.prompt_set
    servers: dict[str, str] = arguments.servers
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    c = arguments.concurrency
    for number in range(-1, arguments.rounds):
        for name, url in servers.items():
            load = Load(
                concurrency=c,
                prompts=prompts,
                requests=c,
                output_tokens=(arguments.tokens, arguments.tokens),
                temperature=arguments.temperature,
                stream_interval=ONE_CHUNK,
                seed=max(number, 0),
            )
            cell = await step_time(url, load)
            if number >= 0:
                rounds[name].append(cell)
                print(f"round {number} {name}: {cell['ms_per_step']:.3f} ms per step", flush=True)
    result: dict[str, Any] = {"concurrency": c, "tokens": arguments.tokens, "servers": compare(rounds)}
    if arguments.trace_steps:
        result["traces"] = {}
        for name, url in servers.items():
            long = Load(c, prompts, requests=c, output_tokens=(4 * arguments.trace_steps + 2000,) * 2)
            path = await capture_trace(url, long, arguments.trace_steps, arguments.trace_dir / name)
            result["traces"][name] = trace_syncs.per_step(trace_syncs.load_events(path))
    return result


def _started(sweep: Sweep, names: Sequence[str], logs: Path) -> dict[str, Server]:
    """The servers of these arms, ready; ours after the others, since it measures step costs while it starts.

    Raises ServerFailed, with every server stopped again.
    """
    servers: dict[str, Server] = {}
    arms = {arm.name: (place, arm) for place, arm in enumerate(sweep.arms)}
    unknown = set(names) - set(arms)
    if unknown:
        raise AdaptiveError(f"{', '.join(sorted(unknown))} is no arm of {sweep.name}; it has {', '.join(arms)}.")
    try:
        for ours in (False, True):
            wave = [name for name in names if (arms[name][1].role == "ours") == ours]
            for name in wave:
                place, arm = arms[name]
                servers[name] = for_arm(sweep, arm, place, logs / f"{name}.log")
            for name in wave:
                servers[name].wait_ready(sweep.start_timeout)
    except ServerFailed:
        _stop(servers)
        raise
    return {name: servers[name] for name in names}


def _stop(servers: dict[str, Server]) -> None:
    for server in servers.values():
        server.stop()


def _named(given: str) -> tuple[str, str]:
    name, separator, url = given.partition("=")
    return (name, url.rstrip("/")) if separator else (given.rstrip("/"), given.rstrip("/"))


def main(argv: Sequence[str]) -> int:
    """Time decode steps on running servers, alternating between them; the first is what others are compared to. With
    --config the servers of these arms are started for it."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks steptime", description=main.__doc__)
    parser.add_argument("--url", action="append", default=[], help="URL or NAME=URL, once per server")
    parser.add_argument("--config", type=Path, help="a sweep's file: start the servers of --arms")
    parser.add_argument("--arms", nargs="+", default=[], help="arms of --config")
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="output of servers that are started")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", type=Path, help="packed prompts; without it random token ids")
    parser.add_argument("--trace-steps", type=int, default=0, help="also profile so many steps of each server")
    parser.add_argument("--trace-dir", type=Path, default=Path("traces"), help="on the servers' machine")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    arguments = parser.parse_args(argv)
    arguments.trace_dir = arguments.trace_dir.absolute()
    if bool(arguments.url) == bool(arguments.config) or bool(arguments.config) != bool(arguments.arms):
        parser.error("give either --url, or --config and --arms")
    arguments.prompt_set = SyntheticPrompts((1000, 10000), (64, 64))
    if arguments.prompts:
        arguments.prompt_set = Prompts(read_packed(arguments.prompts))
    started: dict[str, Server] = {}
    if arguments.config:
        sweep = config.read(arguments.config)
        arguments.prompt_set = make(sweep.prompts, arguments.config.parent)
        started = _started(sweep, arguments.arms, arguments.logs)
    arguments.servers = {name: server.url for name, server in started.items()} or dict(map(_named, arguments.url))
    try:
        result = asyncio.run(_run(arguments))
    finally:
        _stop(started)
    print("\n| server | ms per token | ms per step | spread | relative | accepted length | errors |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, row in result["servers"].items():
        spread_text = f"{row['spread']:.1%}" if row["spread"] is not None else "-"
        accepted = f"{row['accept_length']:.3f}" if row["accept_length"] else "-"
        print(
            f"| {name} | {row['ms_per_token']:.3f} | {row['ms_per_step']:.3f} | {spread_text} "
            f"| {row['relative']:.3f} | {accepted} | {row['errors']} |"
        )
    if "traces" in result:
        print("\n" + trace_syncs.table(result["traces"]) + "\n" + trace_syncs.largest(result["traces"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0
