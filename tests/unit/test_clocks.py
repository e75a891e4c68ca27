"""A machine whose clock is set, back or forth, changes no decision: times are differences of a monotonic clock."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVES = [path for folder in ("sglang_adaptive", "patches", "launch") for path in sorted((ROOT / folder).rglob("*.py"))]
WALL = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.now", "datetime.utcnow", "date.today"}


def wall_clocks(source: str) -> set[str]:
    """The wall clocks that ``source`` names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = ".".join(ast.unparse(node).split(".")[-2:])
            found |= {name} & WALL
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found |= {f"time.{alias.name}" for alias in node.names} & WALL
    return found


@pytest.mark.parametrize("path", SERVES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_serves_reads_a_wall_clock(path):
    assert not wall_clocks(path.read_text())


def test_a_wall_clock_would_be_found():
    for source in ("time.time()", "from time import time_ns", "x = datetime.datetime.now()", "datetime.date.today()"):
        assert wall_clocks(source), source
    assert not wall_clocks("time.monotonic() + time.perf_counter()")
