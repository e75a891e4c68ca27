"""What a study found, as a table of ratios with intervals, and as Pareto pictures."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_adaptive.benchmarks.simulator.study import EXACT, believes
from sglang_adaptive.benchmarks.stats import geomean

Row = dict[str, Any]
# Who knows the true probabilities, and no outcome: what a policy can attain ("oracle probabilities").
BOUND = "informed"

# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and the half width of its 95 % interval (Student's t); NaN with one seed."""

    mean: float
    half: float

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        n, mean = len(values), sum(values) / len(values)
        if n < 2:
            return Estimate(mean, math.nan)
        sd = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
        return Estimate(mean, _T.get(n - 1, 1.96) * sd / math.sqrt(n))

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if math.isnan(self.half) else f" ± {self.half:.3f}")


@dataclass(frozen=True)
class Cell:
    """Throughputs by arm and seed at one table, traffic, error and concurrency; ``learning``: of the first fifth."""

    table: str
    traffic: str
    wrong: str
    concurrency: int
    tok_s: dict[str, dict[int, float]]
    learning: dict[str, dict[int, float]]

    def mean(self, arm: str) -> float:
        return sum(self.tok_s[arm].values()) / len(self.tok_s[arm])

    @property
    def best_fixed(self) -> str | None:
        """The fixed length that is best on average over the seeds."""
        fixed = [arm for arm in self.tok_s if arm.startswith("fixed-")]
        return max(fixed, key=self.mean) if fixed else None

    def ratio(self, above: str, below: str | None, learning: bool = False) -> Estimate | None:
        """Throughput of one arm over another's, seed by seed."""
        table = self.learning if learning else self.tok_s
        if below is None or above not in table or below not in table:
            return None
        return Estimate.of([table[above][seed] / table[below][seed] for seed in sorted(table[above])])


def cells(rows: Iterable[Row]) -> list[Cell]:
    """The study's cells; arms that believe nothing are the same whatever a policy is wrong about."""
    groups: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["table"], row["traffic"], row["concurrency"]].append(row)
    found = []
    for (table, traffic, concurrency), group in sorted(groups.items()):
        for wrong in dict.fromkeys(row["wrong"] for row in group):
            tok_s: dict[str, dict[int, float]] = defaultdict(dict)
            learning: dict[str, dict[int, float]] = defaultdict(dict)
            for row in group:
                if row["wrong"] == wrong or (row["wrong"] == EXACT and not believes(row["arm"])):
                    tok_s[row["arm"]][row["seed"]] = row["tok_s"]
                    learning[row["arm"]][row["seed"]] = row["learning_tok_s"]
            found.append(Cell(table, traffic, wrong, concurrency, dict(tok_s), dict(learning)))
    return found


def ratio_table(of: Sequence[Cell], arm: str) -> list[str]:
    """Markdown lines: one per cell, how ``arm`` compares."""
    lines = [
        "| concurrency | none, tok/s | best fixed, tok/s | "
        f"{arm}, tok/s | / best fixed | / none | / clairvoyant | / oracle probabilities | / stock | "
        "/ better of both, learning | oracle probabilities, tok/s | that / clairvoyant |",
        "| ---: |" + " ---: |" * 11,
    ]
    for cell in of:
        best = cell.best_fixed
        rival = max((a for a in (best, "none") if a and a in cell.tok_s), key=cell.mean, default=None)
        ratios = [cell.ratio(arm, below) for below in (best, "none", "clairvoyant", BOUND, "stock")]
        ratios.append(cell.ratio(arm, rival, learning=True))
        shown = [
            str(cell.concurrency),
            f"{cell.mean('none'):.0f}" if "none" in cell.tok_s else "",
            f"{cell.mean(best):.0f} ({best[6:]})" if best else "",
            f"{cell.mean(arm):.0f}",
            *("" if ratio is None else str(ratio) for ratio in ratios),
            f"{cell.mean(BOUND):.0f}" if BOUND in cell.tok_s else "",
            "" if (attainable := cell.ratio(BOUND, "clairvoyant")) is None else str(attainable),
        ]
        lines.append("| " + " | ".join(shown) + " |")
    return lines


def summary(of: Sequence[Cell], arm: str) -> list[str]:
    """Markdown lines: smallest and geometric mean of every ratio over cells, per table, traffic and error."""
    lines = [
        "| table | traffic | wrong at the start | / best fixed: least, geomean | / none: least, geomean | "
        "/ clairvoyant: least, geomean | / oracle probabilities: least, geomean | oracle probabilities / clairvoyant: "
        "least, geomean | / better of both while learning: least |",
        "| --- | --- | --- |" + " ---: |" * 6,
    ]
    groups: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in of:
        groups[cell.table, cell.traffic, cell.wrong].append(cell)
    for (table, traffic, wrong), group in groups.items():
        shown = [table, traffic, wrong]
        pairs = [(arm, "best fixed"), (arm, "none"), (arm, "clairvoyant"), (arm, BOUND), (BOUND, "clairvoyant")]
        for above, below in pairs:
            values = [
                (ratio.mean, cell.concurrency)
                for cell in group
                if (ratio := cell.ratio(above, cell.best_fixed if below == "best fixed" else below))
            ]
            shown.append(_least(values) + f", {geomean([value for value, _ in values]):.3f}" if values else "")
        learning = []
        for cell in group:
            rivals = [a for a in (cell.best_fixed, "none") if a and a in cell.tok_s]
            if rivals:
                learning.append((cell.ratio(arm, max(rivals, key=cell.mean), True).mean, cell.concurrency))
        shown.append(_least(learning) if learning else "")
        lines.append("| " + " | ".join(shown) + " |")
    return lines


def _least(values: Sequence[tuple[float, int]]) -> str:
    value, concurrency = min(values)
    return f"{value:.3f} (c={concurrency})"


def markdown(rows: Sequence[Row], arms: Sequence[str]) -> str:
    """The whole report: a summary per arm of ours, then all cells."""
    found, lines = cells(rows), []
    for arm in (arm for arm in arms if arm.startswith("ours")):
        lines += [f"## {arm}: summary", "", *summary([cell for cell in found if arm in cell.tok_s], arm), ""]
    for arm in (arm for arm in arms if arm == "ours"):
        groups: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
        for cell in found:
            groups[cell.table, cell.traffic, cell.wrong].append(cell)
        for (table, traffic, wrong), group in groups.items():
            lines += [f"## {arm}: {table}, {traffic}, {wrong}", "", *ratio_table(group, arm), ""]
    return "\n".join(lines)


def pareto(of: Sequence[Cell]) -> dict[str, list[dict[str, float]]]:
    """Points per arm for ``plot.draw``: throughput against what one user gets."""
    points: dict[str, list[dict[str, float]]] = defaultdict(list)
    for cell in of:
        for arm in cell.tok_s:
            mean = cell.mean(arm)
            points[arm].append({"concurrency": cell.concurrency, "tok_s": mean, "tok_s_user": mean / cell.concurrency})
    return dict(points)


def roles(arms: Iterable[str]) -> dict[str, str]:
    """How ``plot.draw`` shows each arm."""
    known = {"none": "none", "stock": "compact", "ours": "ours"}
    return {arm: "fixed" if arm.startswith("fixed-") else known.get(arm, "other") for arm in arms}
