"""Which cells a sweep measures, in which order, with which servers alive, and what an earlier run already did."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sglang_adaptive.benchmarks.config import Arm, Sweep


class Cell(NamedTuple):
    """One measurement."""

    arm: str
    concurrency: int
    repeat: int


@dataclass(frozen=True)
class Stage:
    """Servers that are alive together, and the cells measured meanwhile, in order."""

    arms: list[Arm]
    cells: list[Cell]


def stages(sweep: Sweep) -> list[Stage]:
    """The whole sweep, arms alternated: another one goes first in each repeat and, where several are alive, cell."""
    result = []
    repeats = [[repeat] for repeat in range(sweep.repeats)] if sweep.restarts else [list(range(sweep.repeats))]
    for together in repeats:
        for group in _chunks(_rotated(sweep.arms, together[0]), sweep.resident):
            cells = [
                Cell(arm.name, concurrency, repeat)
                for repeat in together
                for place, concurrency in enumerate(sweep.concurrency)
                for arm in _rotated(group, repeat + place if len(group) > 1 else 0)
            ]
            result.append(Stage(group, cells))
    return result


def remaining(all_stages: Iterable[Stage], done: set[Cell]) -> list[Stage]:
    """Stages with cells that are not in ``done``, and of their servers those that such a cell needs."""
    result = []
    for stage in all_stages:
        cells = [cell for cell in stage.cells if cell not in done]
        needed = {cell.arm for cell in cells}
        if cells:
            result.append(Stage([arm for arm in stage.arms if arm.name in needed], cells))
    return result


def _rotated(items: list[Any], by: int) -> list[Any]:
    by %= len(items)
    return items[by:] + items[:by]


def _chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


class Rows:
    """The results file: one JSON object per line, appended at once. ``kind`` is cell, failure or trace."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[dict[str, Any]]:
        """All rows; a line that an interruption cut short is left out."""
        if not self._path.exists():
            return []
        rows = []
        for line in self._path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

    def append(self, row: dict[str, Any]) -> None:
        """Write ``row``, on a line of its own also after a line that was cut short."""
        text = self._path.read_text() if self._path.exists() else ""
        with self._path.open("a") as file:
            file.write(("" if not text or text.endswith("\n") else "\n") + json.dumps(row) + "\n")

    def done(self, *, retry_failed: bool) -> set[Cell]:
        """Cells that need no more work: measured ones, and failed ones unless these are to be tried again."""
        kinds = {"cell"} if retry_failed else {"cell", "failure"}
        return {Cell(row["arm"], row["concurrency"], row["repeat"]) for row in self.read() if row["kind"] in kinds}

    def traced(self) -> set[tuple[str, int]]:
        """(arm, concurrency) of the traces that are there."""
        return {(row["arm"], row["concurrency"]) for row in self.read() if row["kind"] == "trace"}


class Clock:
    """How much time the rest takes, learned as the sweep goes: seconds per server start, and per cell beyond its
    window."""

    def __init__(self, start_estimate: float, settle: float = 3.0) -> None:
        self.start, self.around = start_estimate, settle

    def started(self, seconds: float) -> None:
        """Learn from a start of a stage's servers, warm-up included."""
        self.start = seconds

    def measured(self, beyond_window: float) -> None:
        """Learn from a cell."""
        self.around += 0.3 * (beyond_window - self.around)

    def left(self, rest: list[Stage], seconds: float, *, starting: bool = True) -> float:
        """Seconds for ``rest``; ``starting`` False when the first stage's servers run already."""
        cells = sum(len(stage.cells) for stage in rest)
        return self.start * (len(rest) - (not starting)) + cells * (seconds + self.around)

    def window(self, rest: list[Stage], budget: float, longest: float, shortest: float) -> float:
        """The steady window that lets ``rest`` fit into ``budget`` seconds, within the two bounds."""
        cells = sum(len(stage.cells) for stage in rest)
        fitting = (budget - self.start * len(rest)) / max(cells, 1) - self.around
        return min(longest, max(shortest, fitting))
