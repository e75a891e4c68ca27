"""Cost tables for end-to-end tests: on a tiny model the real step cost hardly grows with the tokens verified."""

from __future__ import annotations

import json
import os
from pathlib import Path

# What is decided must not depend on the machine that runs the test, nor on its load: no measured time may count
# (measured times would contradict a made-up table, and rightly), and drafting goes on whatever it costs there.
FIXED = {
    "SGLANG_ADAPTIVE_PROFILE_SECONDS": "5",
    "SGLANG_ADAPTIVE_COST_CORRECTION": "off",
    "SGLANG_ADAPTIVE_SKIP_DRAFT": "off",
}
MADE_UP = Path(__file__).parent / "drift"


def environment(cache_dir: Path, **options: str) -> dict[str, str]:
    """Environment of a server that keeps its profile in ``cache_dir``; ``options`` by the names of the options.

    Where it profiles, it does so as always, and writes down costs by which likely drafts are worth theirs and unlikely
    ones are not.
    """
    named = {f"SGLANG_ADAPTIVE_{name.upper()}": value for name, value in options.items()}
    path = os.pathsep.join([str(MADE_UP), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **FIXED,
        "SGLANG_ADAPTIVE_CACHE_DIR": str(cache_dir),
        "ADAPTIVE_TEST_COSTS": "dear",
        "PYTHONPATH": path,
        **named,
    }


def hopeless(costs: Path, into: Path) -> Path:
    """A cache folder with the cost tables of ``costs``, changed so that no draft can ever earn what drafting costs."""
    tables = list(costs.glob("cost-*.json"))
    assert tables, f"no server left a cost table in {costs}"
    for path in tables:
        table = json.loads(path.read_text())
        table["draft"]["ms"] = [1e4 + index for index in range(len(table["draft"]["ms"]))]
        table["narrow_draft"] = dict.fromkeys(table.get("narrow_draft", {}), table["draft"]["ms"])
        (into / path.name).write_text(json.dumps(table))
    return into
