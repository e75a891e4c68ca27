"""Simulates decode steps with the server's own policy code, to compare and to plan without the hardware."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_adaptive.benchmarks import plot
from sglang_adaptive.benchmarks.simulator import replay, report, study, tables, traffic
from sglang_adaptive.benchmarks.simulator.arms import maker
from sglang_adaptive.benchmarks.simulator.loop import Scenario
from sglang_adaptive.errors import AdaptiveError

ARMS = ["none", *(f"fixed-{n}" for n in range(1, study.GAMMA + 1)), "stock", "ours", "clairvoyant", "informed"]


_SAVE_EVERY = 20


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _arms(text: str) -> tuple[str, ...]:
    # Settings of an arm hold commas, so arms may be set apart by semicolons.
    return tuple(filter(None, (part.strip() for part in text.split(";" if ";" in text or ":" in text else ","))))


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m sglang_adaptive.benchmarks simulate", description=__doc__, allow_abbrev=False
    )
    result.add_argument(
        "--table", type=_names, default=("v4-pro-8xb300",), help=f"of {', '.join(tables.names())}, or files"
    )
    result.add_argument(
        "--traffic",
        type=_names,
        default=("mixed",),
        help=f"of {', '.join(traffic.TRAFFIC)}, or traces; TRACE@NAME hears, of {', '.join(replay.HEARD)}",
    )
    result.add_argument(
        "--arms", type=_arms, default=tuple(ARMS), help="; between arms, as in none;ours:objective=rate"
    )
    wrong = ", ".join([*tables.ERRORS, *study.HEADS])
    result.add_argument("--wrong", type=_names, default=(study.EXACT,), help=f"wrong at the start; of {wrong}")
    result.add_argument("--concurrency", type=_names, default=tuple(str(1 << n) for n in range(11)))
    result.add_argument("--seeds", type=int, default=3)
    result.add_argument("--tokens-per-user", type=int, default=2000, help="output tokens per request stream and run")
    result.add_argument("--least-tokens", type=int, default=12_000, help="output tokens per run, at least")
    result.add_argument("--arrivals", type=float, help="open loop: requests per second (concurrency is then a limit)")
    result.add_argument("--engines", type=int, default=1)
    result.add_argument("--router", choices=["round-robin", "least-loaded"], default="round-robin")
    result.add_argument("--prefill", choices=["none", "separate", "mixed"], default="none")
    result.add_argument(
        "--host-ms",
        type=_names,
        default=("0", "0", "0"),
        help="what a step takes at least: without a draft, one that verifies all drafts, one that trims",
    )
    result.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    result.add_argument("--out", type=Path, help="write OUT.md, OUT.json and OUT-TABLE-TRAFFIC.png")
    result.add_argument(
        "--resume", action="store_true", help="keep the simulations that OUT.json has; it grows on the way"
    )
    result.add_argument("--title", default="Simulated throughput", help="of the report")
    result.add_argument("--note", default="", help="what the numbers mean; goes into the report")
    return result


def main(argv: Sequence[str]) -> int:
    """Run the study that the arguments describe, and print or write what it found."""
    arguments = parser().parse_args(argv)
    plan = _plan(arguments)
    started = time.monotonic()
    known = _known(arguments)
    tasks = [task for task in plan.tasks() if study.identity(task) not in known]
    columns = [TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(tasks))

        def done(result: report.Row) -> None:
            progress.advance(bar)
            known[study.found_in(result)] = result
            if arguments.resume and len(known) % _SAVE_EVERY == 0:
                _write(arguments.out.with_name(arguments.out.name + ".json"), list(known.values()))

        study.run_all(tasks, arguments.jobs, done)
    rows = [known[study.identity(task)] for task in plan.tasks()]
    seconds = time.monotonic() - started
    text = _report(arguments, plan, rows, seconds, argv)
    if arguments.out is None:
        print(text)
        return 0
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.with_name(arguments.out.name + ".md").write_text(text)
    _write(arguments.out.with_name(arguments.out.name + ".json"), rows)
    for name, cells in _by_picture(rows).items():
        path = arguments.out.with_name(f"{arguments.out.name}-{name}.png")
        plot.draw(report.pareto(cells), report.roles(plan.arms), f"simulated: {name}", path)
    return 0


def _plan(arguments: argparse.Namespace) -> study.Plan:
    try:
        concurrency = tuple(sorted({int(text) for text in arguments.concurrency}))
    except ValueError as error:
        raise AdaptiveError("--concurrency must be whole numbers, set apart by commas.") from error
    if not concurrency or concurrency[0] < 1 or arguments.seeds < 1 or arguments.engines < 1 or arguments.jobs < 1:
        raise AdaptiveError("--concurrency, --seeds, --engines and --jobs must be 1 or more.")
    if arguments.arrivals is not None and not arguments.arrivals > 0:
        raise AdaptiveError("--arrivals must be above 0 requests per second.")
    if arguments.arrivals is None and arguments.engines > concurrency[0]:
        raise AdaptiveError("--concurrency must give every one of the --engines a request.")
    for part in (part for wrong in arguments.wrong for part in wrong.split()):
        if part not in tables.ERRORS and part not in study.HEADS:
            raise AdaptiveError(f"A policy cannot be wrong by {part!r}; see --help.")
    for name in arguments.table:
        table, _ = tables.load_table(name)
        for arm in arguments.arms:
            maker(arm, study.GAMMA, table, table, 0.0)
    for name in arguments.traffic:
        if not replay.is_trace(name):
            traffic.named(name)
    try:
        plain_ms, whole_ms, trimmed_ms = (float(text) for text in arguments.host_ms)
    except ValueError:
        raise AdaptiveError("--host-ms must be three times in ms, set apart by commas.") from None
    if not all(0 <= ms < 1e4 for ms in (plain_ms, whole_ms, trimmed_ms)):
        raise AdaptiveError("--host-ms must lie between 0 and 10000 ms.")
    scenario = Scenario(
        1,
        1,
        arrivals_per_s=arguments.arrivals,
        engines=arguments.engines,
        router=arguments.router,
        prefill=arguments.prefill,
        host_ms=(plain_ms, whole_ms, trimmed_ms),
    )
    return study.Plan(
        arguments.table,
        arguments.traffic,
        arguments.wrong,
        arguments.arms,
        concurrency,
        arguments.seeds,
        arguments.tokens_per_user,
        arguments.least_tokens,
        scenario,
    )


def _known(arguments: argparse.Namespace) -> dict[tuple[Any, ...], report.Row]:
    if not arguments.resume:
        return {}
    if arguments.out is None:
        raise AdaptiveError("--resume needs --out, where the simulations are.")
    path = arguments.out.with_name(arguments.out.name + ".json")
    try:
        record = json.loads(path.read_text())
        rows = [dict(zip(record["columns"], values, strict=True)) for values in record["rows"]]
    except FileNotFoundError:
        return {}
    except (ValueError, LookupError, TypeError) as error:
        raise AdaptiveError(f"{path} holds no simulations to go on with ({error}); remove it.") from error
    return {study.found_in(row): row for row in rows}


def _write(path: Path, rows: list[report.Row]) -> None:
    """The numbers, whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(_compact(rows))
    part.replace(path)


def _compact(rows: list[report.Row]) -> str:
    """JSON with one line per simulation and the names of the columns once."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    shown = [[round(v, 4) if isinstance(v := row.get(name), float) else v for name in names] for row in rows]
    lines = ",\n".join(json.dumps(values) for values in shown)
    return f'{{"columns": {json.dumps(names)}, "rows": [\n{lines}\n]}}\n'


def _by_picture(rows: list[report.Row]) -> dict[str, list[report.Cell]]:
    pictures: dict[str, list[report.Cell]] = {}
    for cell in report.cells(rows):
        if cell.wrong == study.EXACT:
            path, _, heard = cell.traffic.rpartition("@")
            kind = (Path(path).stem, heard) if heard in replay.HEARD else (Path(cell.traffic).stem,)
            name = "-".join([Path(cell.table).stem, *kind])
            pictures.setdefault(name, []).append(cell)
    return pictures


def _report(
    arguments: argparse.Namespace, plan: study.Plan, rows: list[report.Row], seconds: float, argv: Sequence[str]
) -> str:
    command = "python -m sglang_adaptive.benchmarks simulate " + " ".join(
        f"'{part}'" if any(sign in part for sign in " ;") else part for part in argv
    )
    lines = [
        f"# {arguments.title}",
        "",
        f"{time.strftime('%Y-%m-%d')}, {len(rows)} simulations in {seconds:.0f} s.",
        "",
    ]
    lines += [f"    {command}", ""] + ([arguments.note, ""] if arguments.note else [])
    for name in plan.tables:
        _, key = tables.load_table(name)
        lines += [f"* Table {name}: " + "; ".join(f"{part}: {text}" for part, text in key.items()) + "."]
    lines += [
        "",
        "Ratios are means over seeds of paired runs, with 95 % intervals; every arm serves the same requests.",
        "",
    ]
    return "\n".join(lines) + report.markdown(rows, plan.arms) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
