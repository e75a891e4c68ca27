"""How many requests per second a fleet carries within a latency promise, with each way to speculate (simulated)."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_adaptive.benchmarks.simulator import study, tables, traffic
from sglang_adaptive.benchmarks.simulator.arms import maker
from sglang_adaptive.benchmarks.simulator.loop import TRIM_MS, Scenario
from sglang_adaptive.errors import AdaptiveError

PREFILL = {
    "none": "prompts are prefilled elsewhere (prefill/decode disaggregation)",
    "separate": "prompts are prefilled in steps of their own while decoding waits",
}
QUANTILES = {"p50": "The median request", "p99": "The slowest request in a hundred"}
ARMS = ("none", "fixed-1", "fixed-3", "fixed-5", "fixed-7", "ours")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m sglang_adaptive.benchmarks fleet", description=__doc__, allow_abbrev=False
    )
    result.add_argument("--table", default="v4-pro-8xb300", help=f"of {', '.join(tables.names())}, or a file")
    result.add_argument("--traffic", default="mixed", help=f"of {', '.join(traffic.TRAFFIC)}, or a trace")
    result.add_argument("--arms", default=",".join(ARMS), help="separated by commas")
    result.add_argument("--engines", type=int, default=4)
    result.add_argument("--running", type=int, default=256, help="requests that one engine runs at most")
    result.add_argument("--prefill", choices=list(PREFILL), default="none")
    result.add_argument("--rates", default="4,8,16,24,32,40,48,56", help="requests per second per engine")
    result.add_argument("--slo-ms", default="8,12,15,25", help="promises: ms per output token")
    result.add_argument("--seconds", type=float, default=20.0, help="simulated seconds of arrivals in a run")
    result.add_argument("--seeds", type=int, default=2)
    result.add_argument("--jobs", type=int, default=2)
    result.add_argument("--out", type=Path, help="write OUT.md and OUT.png")
    return result


def capacity(rates: Sequence[float], token_ms: Sequence[float], slo_ms: float) -> float:
    """The rate at which ``token_ms`` first passes ``slo_ms``, on straight lines between the rates.

    0 when the lowest rate does not keep the promise, the highest rate when all do.
    """
    if token_ms[0] > slo_ms:
        return 0.0
    for at in range(1, len(rates)):
        if token_ms[at] > slo_ms:
            share = (slo_ms - token_ms[at - 1]) / (token_ms[at] - token_ms[at - 1])
            return float(rates[at - 1] + share * (rates[at] - rates[at - 1]))
    return float(rates[-1])


def tasks(arguments: argparse.Namespace, arms: Sequence[str], rates: Sequence[float]) -> list[study.Task]:
    """One simulation for each arm, rate and seed; a run ends after as many tokens as its arrivals bring."""
    length = float(study.pool(arguments.traffic, 1.0, 0).length.mean())
    result = []
    for rate in rates:
        total = rate * arguments.engines
        tokens = int(total * arguments.seconds * length)
        scenario = Scenario(
            arguments.running,
            tokens,
            arrivals_per_s=total,
            engines=arguments.engines,
            router="least-loaded",
            prefill=arguments.prefill,
        )
        result += [
            study.Task(arguments.table, arguments.traffic, study.EXACT, arm, scenario, seed)
            for arm in arms
            for seed in range(arguments.seeds)
        ]
    return result


def curves(rows: list[dict[str, Any]], arms: Sequence[str], name: str) -> dict[str, list[float]]:
    """By arm, the mean of ``name`` over seeds at each rate, in the order of the rates; no value counts as infinite."""
    rates = sorted({row["arrivals_per_s"] for row in rows})
    return {
        arm: [
            float(
                np.mean([row.get(name, np.inf) for row in rows if row["arm"] == arm and row["arrivals_per_s"] == rate])
            )
            for rate in rates
        ]
        for arm in arms
    }


def markdown(rates: Sequence[float], latency: dict[str, dict[str, list[float]]], slos: Sequence[float]) -> str:
    """What each arm carries within each promise, and how long a token takes at each rate, for each quantile."""
    lines = []
    for quantile, by_arm in latency.items():
        lines += [f"## {QUANTILES[quantile]}", "", "Requests per second and engine within a promise on it:", ""]
        lines += ["| promise, ms per token | " + " | ".join(by_arm) + " | ours / best other | engines saved |"]
        lines += ["| ---: |" + " ---: |" * (len(by_arm) + 2)]
        for slo in slos:
            carried = {arm: capacity(rates, values, slo) for arm, values in by_arm.items()}
            best = max((value for arm, value in carried.items() if arm != "ours"), default=0.0)
            ours = carried.get("ours", 0.0)
            gain, saved = (f"{ours / best:.2f}", f"{1 - best / ours:.0%}") if ours and best else ("-", "-")
            shown = " | ".join(("≥ " if value == rates[-1] else "") + f"{value:.1f}" for value in carried.values())
            lines += [f"| {slo:g} | {shown} | {gain} | {saved} |"]
        lines += ["", "ms per output token, queueing included, by requests per second and engine:", ""]
        lines += ["| rate | " + " | ".join(by_arm) + " |", "| ---: |" + " ---: |" * len(by_arm)]
        for at, rate in enumerate(rates):
            lines += [f"| {rate:g} | " + " | ".join(f"{values[at]:.1f}" for values in by_arm.values()) + " |"]
        lines += [""]
    return "\n".join(lines)


def draw(
    rates: Sequence[float],
    latency: dict[str, dict[str, list[float]]],
    slos: Sequence[float],
    title: str,
    path: Path,
) -> None:
    """Time per output token over the load, one panel per quantile, one line per arm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from sglang_adaptive.benchmarks.plot import STYLE

    figure, panels = pyplot.subplots(1, len(latency), figsize=(6 * len(latency), 5), dpi=110, squeeze=False)
    for axes, (quantile, by_arm) in zip(panels[0], latency.items(), strict=True):
        fixed = [arm for arm in by_arm if arm.startswith("fixed")]
        blues = dict(zip(fixed, pyplot.get_cmap("Blues")(np.linspace(0.4, 0.95, len(fixed))), strict=True))
        for arm, values in by_arm.items():
            style: dict[str, Any] = dict(STYLE.get("fixed" if arm in blues else arm, STYLE["other"]))
            if arm in blues:
                style["color"] = blues[arm]
            axes.plot(rates, values, marker="o", markersize=4, label=arm, **style)
        for slo in slos:
            axes.axhline(slo, color="0.6", linewidth=0.8, linestyle=":")
            axes.annotate(f"{slo:g} ms", (rates[0], slo), (0, 2), textcoords="offset points", fontsize=8, color="0.4")
        axes.set(yscale="log", xlabel="load: requests/s per engine", ylabel="ms per output token")
        axes.set_title(QUANTILES[quantile], fontsize=10)
        axes.grid(True, which="both", alpha=0.25)
        axes.legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _numbers(text: str, name: str) -> list[float]:
    try:
        values = sorted({float(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or not all(0 < value < 1e9 for value in values):
        raise AdaptiveError(f"--{name} must be numbers above 0, separated by commas.")
    return values


def main(argv: Sequence[str]) -> int:
    """Run the study that the arguments describe, and print or write what it found."""
    arguments = parser().parse_args(argv)
    rates, slos = _numbers(arguments.rates, "rates"), _numbers(arguments.slo_ms, "slo-ms")
    if min(arguments.engines, arguments.running, arguments.seeds, arguments.jobs) < 1 or not arguments.seconds > 0:
        raise AdaptiveError("--engines, --running, --seeds, --jobs and --seconds must be above 0.")
    arms = tuple(filter(None, (part.strip() for part in arguments.arms.split(","))))
    table, key = tables.load_table(arguments.table)
    if not Path(arguments.traffic).exists():
        traffic.named(arguments.traffic)
    for arm in arms:
        maker(arm, study.GAMMA, table, table, TRIM_MS)
    todo, started = tasks(arguments, arms, rates), time.monotonic()
    columns = [TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(todo))
        rows = study.run_all(todo, arguments.jobs, lambda _: progress.advance(bar))
    latency = {name: curves(rows, arms, f"token_ms_{name}") for name in QUANTILES}
    title = f"{arguments.engines} engines, {Path(arguments.table).stem}, {arguments.traffic} traffic (simulated)"
    text = "\n".join(
        [
            f"# What a fleet gains: {title}",
            "",
            f"{time.strftime('%Y-%m-%d')}, {len(rows)} simulations in {time.monotonic() - started:.0f} s.",
            "",
            "    python -m sglang_adaptive.benchmarks fleet " + " ".join(argv),
            "",
            "* Table " + "; ".join(f"{part}: {value}" for part, value in key.items()) + ".",
            f"* Requests arrive as a Poisson process at a router that gives each to the least loaded engine; an engine "
            f"runs at most {arguments.running}, {PREFILL[arguments.prefill]}.",
            "",
            markdown(rates, latency, slos),
        ]
    )
    if arguments.out is None:
        print(text)
        return 0
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    picture = arguments.out.with_name(arguments.out.name + ".png")
    draw(rates, latency, slos, title, picture)
    arguments.out.with_name(arguments.out.name + ".md").write_text(f"{text}\n![{title}]({picture.name})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
