"""Turns a sweep's rows into a result file: markdown tables, ratios, the Pareto picture, and all of it as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_adaptive.benchmarks import plot, trace_syncs
from sglang_adaptive.benchmarks.compare import HEAVY, LEAST, Results, pareto, standing
from sglang_adaptive.benchmarks.plan import Rows
from sglang_adaptive.benchmarks.stats import spread
from sglang_adaptive.errors import AdaptiveError

# A process of the load generator that computes for so much of the window may be what is measured.
BUSY = 0.8


def number(value: float | None, form: str = ".2f") -> str:
    """``value`` in ``form``, or a dash."""
    return "-" if value is None else format(value, form)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table with its first column to the left."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def by_cell(results: Results, show: Callable[[str, int], str]) -> str:
    """A table of concurrency by arm."""
    lines = [[str(c), *(show(arm, c) for arm in results.arms)] for c in results.concurrency]
    return table(["concurrency", *results.arms], lines)


def throughput(results: Results, name: str = "tok_s") -> str:
    """Median tokens per second and its spread over repeats."""

    def show(arm: str, c: int) -> str:
        wide = spread(results.values(arm, c, name))
        return number(results.middle(arm, c, name), ",.0f") + (f" ±{wide:.1%}" if wide is not None else "")

    return by_cell(results, show)


def lengths(results: Results) -> str:
    """Accepted length / verify length / budget in drafts per step, where there is speculation."""

    def show(arm: str, c: int) -> str:
        found = [results.middle(arm, c, name) for name in ("accept_length", "verify_length", "budget")]
        return " / ".join([number(found[0]), number(found[1]), number(found[2], ".1f")]) if found[0] else "-"

    return by_cell(results, show)


def latency(results: Results, what: str) -> str:
    """p50 / p99 in ms."""

    def show(arm: str, c: int) -> str:
        return " / ".join(number(results.middle(arm, c, what, q)) for q in ("p50", "p99"))

    return by_cell(results, show)


def ratios(found: dict[str, Any]) -> str:
    """Our arm against the others per cell: ratio of medians, and the range over single repeats."""

    def show(item: dict[str, Any] | None, named: bool) -> str:
        if item is None:
            return "-"
        span = f" [{number(item['low'], '.3f')}, {number(item['high'], '.3f')}]"
        return f"{item['ratio']:.3f}{span}" + (f" {item['other']}" if named else "")

    lines = [
        [str(c), show(cell["fixed"], True), show(cell["none"], False), show(cell["compact"], False)]
        for c, cell in found["cells"].items()
    ]
    return table(["concurrency", "to the best fixed K", "to no speculation", "to stock compact"], lines)


def verdict(found: dict[str, Any]) -> str:
    """What the ratios of one arm add up to, in sentences."""
    means = found["geomean"]
    parts = [
        ("the best fixed K of each cell", means["fixed"]),
        (f"the best single fixed K ({found['best_single']})", means["fixed_single"]),
        ("no speculation", means["none"]),
        ("stock compact", means["compact"]),
        (f"stock compact at concurrency {HEAVY} and above", means["compact_heavy"]),
    ]
    known = [f"{value:.3f} to {name}" for name, value in parts if value is not None]
    text = f"Geometric means of the throughput of {found['arm']}: {', '.join(known) or 'nothing to compare with'}."
    if found["below"]:
        low = ", ".join(f"{ratio:.3f} to {against} at c={c}" for against, c, ratio in found["below"])
        return f"{text} Ratios below {LEAST}: {low}."
    return f"{text} No ratio is below {LEAST}."


def head(run: dict[str, Any]) -> str:
    """Command, hardware, versions and date."""
    machine, sweep = run["machine"], run["sweep"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    commands = [f"python -m sglang_adaptive.benchmarks {item['command']}" for item in run["invocations"]]
    arms = [
        f"* `{name}`: `{' '.join([*(f'{key}={value}' for key, value in arm['env'].items()), *arm['args']]) or '-'}`"
        for name, arm in run["arms"].items()
    ]
    low, high = sweep["output_tokens"]
    return "\n".join(
        [
            f"* date: {run['invocations'][0]['at']} to {run['invocations'][-1]['at']}",
            f"* GPU: {'; '.join(machine['gpus']) or 'none'}; CPU: {machine['cpu']}, {machine['cores']} cores",
            f"* versions: {versions}; Python {machine['python']}; commit {machine['commit'] or 'unknown'}",
            f"* load: closed loop, temperature {sweep['temperature']:g}, {low} to {high} output tokens, end of text "
            f"ignored, prompts {json.dumps(sweep['prompts'])}",
            *simulated(run),
            f"* server, all arms: `{' '.join(sweep['args'])}`",
            *arms,
            "",
            "```",
            *dict.fromkeys(commands),
            "```",
        ]
    )


def simulated(run: dict[str, Any]) -> list[str]:
    """What a reader has to know where acceptance is not the models' own."""
    found = run.get("acceptance")
    if not found:
        return []
    kinds = "; ".join(
        f"{kind['name']} ({kind['share']:.0%}): {', '.join(f'{rate:.3f}' for rate in kind['rates'])}, "
        f"confidences of AUC {kind['auc']:g} and ECE {kind['ece']:g}"
        for kind in found["kinds"]
    )
    return [
        f"* **ACCEPTANCE IS SIMULATED, weights are random numbers**: {found['name']} ({found['source']}), the same "
        f"draws for every arm; with all drafts verified {found['expected_accept_length']:.2f} tokens per step. Rates "
        f"by position, given that the drafts before were accepted: {kinds}. Reading the draws costs each drafting step "
        "a few small kernels, alike for every drafting arm and nothing without speculation"
    ]


def render(results: Results, run: dict[str, Any], standings: list[dict[str, Any]], picture: str, note: str) -> str:
    """The whole result file."""
    repeats = {len(rows) for rows in results.cells.values()}
    windows = [row["seconds"] for rows in results.cells.values() for row in rows.values()]
    parts = [f"# {run['sweep']['name']}", head(run)]
    parts += ["## What it means", *(verdict(found) for found in standings), *([note] if note else [])]
    parts += [
        "## Output tokens per second in the steady window",
        f"Median of {min(repeats)} to {max(repeats)} repeats and half their range; windows of {min(windows):.1f} to "
        f"{max(windows):.1f} s.",
        throughput(results),
    ]
    for found in standings:
        parts += [f"## {found['arm']}: ratio of throughput (medians; range over single repeats)", ratios(found)]
    parts += ["## Throughput against interactivity", f"![Pareto]({picture})"]
    parts += ["## Tokens per second and user while decoding", throughput(results, "tok_s_user")]
    parts += ["## Accepted length / verify length / budget (drafts per step)", lengths(results)]
    parts += ["## Time per output token, p50 / p99, ms", latency(results, "tpot_ms")]
    parts += ["## Time to first token, p50 / p99, ms", latency(results, "ttft_ms")]
    traces = {f"{row['arm']} c={row['concurrency']}": row for row in results.traces if "failed" not in row}
    if traces:
        parts += ["## Profiler traces", trace_syncs.table(traces)]
    parts += ["## What did not work", trouble(results)]
    return "\n\n".join(parts) + "\n"


def trouble(results: Results) -> str:
    """Failed arms, request errors, a busy load generator and failed traces, or that there were none."""
    lines = []
    for row in results.failures:
        if row["repeat"] not in results.cells.get((row["arm"], row["concurrency"]), {}):
            last = row["reason"].strip().splitlines()[0]
            lines.append(f"* {row['arm']} c={row['concurrency']} repeat {row['repeat']}: {last}")
    for (arm, c), rows in results.cells.items():
        for repeat, row in rows.items():
            if row["errors"]:
                lines.append(f"* {arm} c={c} repeat {repeat}: {row['errors']} requests failed: {row['error_examples']}")
            if (busy := (row.get("generator") or {}).get("busy", 0.0)) > BUSY:
                lines.append(f"* {arm} c={c} repeat {repeat}: the load generator was busy ({busy:.0%}): a lower bound")
    lines += [
        f"* trace of {row['arm']} c={row['concurrency']}: {row['failed']}" for row in results.traces if "failed" in row
    ]
    return "\n".join(lines) or "Every server started, every cell was measured, and no request failed."


def write(folder: Path, result: Path, note: str) -> dict[str, Any]:
    """Report on the sweep in ``folder`` into ``result`` (.md), with a .json and a .png beside it; returns the JSON.

    Raises AdaptiveError where ``folder`` has no measured cell.
    """
    rows = Rows(folder / "results.jsonl").read()
    if not any(row["kind"] == "cell" for row in rows):
        raise AdaptiveError(f"{folder} has no measured cell: run the sweep first.")
    run = json.loads((folder / "run.json").read_text())
    results = Results(rows, {name: arm["role"] for name, arm in run["arms"].items()})
    standings = [standing(results, arm) for arm in results.of_role("ours")]
    picture, points = result.with_suffix(".png"), pareto(results)
    plot.draw(points, results.roles, run["sweep"]["name"], picture)
    result.write_text(render(results, run, standings, picture.name, note))
    data = {"run": run, "standings": standings, "pareto": points, "rows": rows}
    result.with_suffix(".json").write_text(json.dumps(data) + "\n")
    return data


def main(argv: Sequence[str]) -> int:
    """Write a sweep's result file: markdown with tables and ratios, the picture and the numbers as JSON."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks report", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="the sweep's --out")
    parser.add_argument("--result", type=Path, help="the markdown file (default: FOLDER/report.md)")
    parser.add_argument("--note", default="", help="what the numbers mean; goes under that heading")
    arguments = parser.parse_args(argv)
    result = arguments.result or arguments.folder / "report.md"
    write(arguments.folder, result, arguments.note)
    print(result.read_text())
    return 0
