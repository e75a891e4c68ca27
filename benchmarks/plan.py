"""Which cells a sweep measures, in which order, with which servers alive, and what an earlier run already did."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
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
    """Servers that are alive together, the cells measured meanwhile, in order, and traces (arm, concurrency) taken
    after them: a server that does not survive its profiler has been measured by then."""

    arms: list[Arm]
    cells: list[Cell]
    traces: list[tuple[str, int]] = field(default_factory=list)


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
            traced = sweep.trace.concurrency if sweep.trace and 0 in together else []
            result.append(Stage(group, cells, [(arm.name, concurrency) for arm in group for concurrency in traced]))
    return result


def remaining(all_stages: Iterable[Stage], done: set[Cell], traced: Set[tuple[str, int]] = frozenset()) -> list[Stage]:
    """Stages with cells not in ``done`` or traces not in ``traced``, and of their servers those that these need."""
    result = []
    for stage in all_stages:
        cells = [cell for cell in stage.cells if cell not in done]
        traces = [trace for trace in stage.traces if trace not in traced]
        needed = {cell.arm for cell in cells} | {arm for arm, _ in traces}
        if needed:
            result.append(replace(stage, arms=[a for a in stage.arms if a.name in needed], cells=cells, traces=traces))
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

    def traced(self, *, retry_failed: bool) -> set[tuple[str, int]]:
        """(arm, concurrency) of the traces that need no more work."""
        return {
            (row["arm"], row["concurrency"])
            for row in self.read()
            if row["kind"] == "trace" and not (retry_failed and "failed" in row)
        }


class Clock:
    """How much time the rest takes, learned as the sweep goes: seconds per server start, and per cell beyond its
    window; a trace is guessed."""

    def __init__(self, start_estimate: float, settle: float = 3.0, trace: float = 15.0) -> None:
        self.start, self.around, self.trace = start_estimate, settle, trace

    def started(self, seconds: float) -> None:
        """Learn from a start of a stage's servers, warm-up included."""
        self.start = seconds

    def measured(self, beyond_window: float) -> None:
        """Learn from a cell."""
        self.around += 0.3 * (beyond_window - self.around)

    def left(self, rest: list[Stage], seconds: float, *, starting: bool = True) -> float:
        """Seconds for ``rest``; ``starting`` False when the first stage's servers run already."""
        cells, traces = self._count(rest)
        return self.start * (len(rest) - (not starting)) + cells * (seconds + self.around) + traces * self.trace

    def window(self, rest: list[Stage], budget: float, longest: float, shortest: float) -> float:
        """The steady window that lets ``rest`` fit into ``budget`` seconds, within the two bounds."""
        cells, traces = self._count(rest)
        fitting = (budget - self.start * len(rest) - traces * self.trace) / max(cells, 1) - self.around
        return min(longest, max(shortest, fitting))

    def _count(self, rest: list[Stage]) -> tuple[int, int]:
        return sum(len(stage.cells) for stage in rest), sum(len(stage.traces) for stage in rest)
