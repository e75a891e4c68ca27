"""Where a server's scheduler spends its CPU time: Python stacks, sampled every 2 ms, as ms per step by function."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from sglang_adaptive.errors import AdaptiveError

SAMPLER = Path(__file__).parent / "sampler"
INTERVAL_MS = 2.0
HOW = f"""\
Start the server with the sampler, switch it on while a load runs, and off again:

  PYTHONPATH=$(python -m sglang_adaptive.benchmarks stacks --path) STACKS_OUT=/tmp/ours \\
      python -m sglang.launch_server ...
  echo c1 > /tmp/ours.on ; ... ; rm /tmp/ours.on     (c1 becomes part of the name)
  python -m sglang_adaptive.benchmarks stacks ours=/tmp/ours-c1-PID.txt:STEPS static=...

STEPS is how many decode steps ran meanwhile. Sampling every {INTERVAL_MS:g} ms slows the scheduler by a few percent.
"""


def read(path: Path) -> list[tuple[int, list[str]]]:
    """(samples, frames from the outermost on, each FILE:FUNCTION:LINE). Raises AdaptiveError for any other file."""
    rows = []
    for line in path.read_text().splitlines():
        count, separator, stack = line.partition(" ")
        if not separator or not count.isdigit():
            raise AdaptiveError(f"{path} is not a file of the sampler: it has the line {line[:80]!r}.")
        rows.append((int(count), stack.split(";")))
    return rows


def inclusive(rows: Sequence[tuple[int, Sequence[str]]], steps: float, root: str | None = None) -> dict[str, float]:
    """ms per step spent in FILE:FUNCTION and what it calls; below the function ``root`` only, if one is named."""
    spent: dict[str, float] = defaultdict(float)
    for count, stack in rows:
        names = [frame.rpartition(":")[0] for frame in stack]
        if root is not None:
            start = next((place for place, name in enumerate(names) if name.rpartition(":")[2] == root), None)
            if start is None:
                continue
            names = names[start:]
        for name in set(names):
            spent[name] += count * INTERVAL_MS / steps
    return spent


def table(columns: dict[str, dict[str, float]], top: int) -> str:
    """A markdown table of the functions that take longest in any column."""
    names = {name for each in columns.values() for name in each}
    most = sorted(names, key=lambda name: (-max(each.get(name, 0.0) for each in columns.values()), name))
    lines = ["| ms per step | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for name in most[:top]:
        lines.append(f"| {name} | " + " | ".join(f"{each.get(name, 0.0):.3f}" for each in columns.values()) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Compare sampled stacks of schedulers: ms per decode step by function, what it calls included."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_adaptive.benchmarks stacks",
        description=main.__doc__,
        epilog=HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("samples", nargs="*", help="NAME=FILE:STEPS")
    parser.add_argument("--path", action="store_true", help="print what goes in front of the server's PYTHONPATH")
    parser.add_argument("--root", default="run_batch", help="below this function only (default: run_batch); '' for all")
    parser.add_argument("--top", type=int, default=60, help="so many functions")
    arguments = parser.parse_args(argv)
    if arguments.path:
        print(SAMPLER)
        return 0
    columns = {}
    for given in arguments.samples:
        name, _, rest = given.partition("=")
        path, _, steps = rest.rpartition(":")
        if not path or not steps.isdigit() or not int(steps):
            parser.error(f"{given!r} is not NAME=FILE:STEPS")
        columns[name] = inclusive(read(Path(path)), int(steps), arguments.root or None)
    if not columns:
        parser.error("no samples are given")
    print(table(columns, arguments.top))
    return 0
