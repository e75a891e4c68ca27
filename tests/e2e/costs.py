"""Cost tables for end-to-end tests: on a tiny model the real step cost hardly grows with the tokens verified."""

from __future__ import annotations

import json
from pathlib import Path

from server import Server, speculative

# What is decided must not depend on the machine that runs the test, nor on its load: no measured time may count
# (measured times would contradict a made-up table, and rightly), and drafting goes on whatever it costs there.
FIXED = {
    "SGLANG_ADAPTIVE_PROFILE_SECONDS": "5",
    "SGLANG_ADAPTIVE_COST_CORRECTION": "off",
    "SGLANG_ADAPTIVE_SKIP_DRAFT": "off",
}


def environment(cache_dir: Path, **options: str) -> dict[str, str]:
    """Environment of a server that keeps its profile in ``cache_dir``; ``options`` by the names of the options."""
    named = {f"SGLANG_ADAPTIVE_{name.upper()}": value for name, value in options.items()}
    return {**FIXED, "SGLANG_ADAPTIVE_CACHE_DIR": str(cache_dir), **named}


def make_dear(cache_dir: Path) -> None:
    """Rewrite every cost table of the folder so that likely drafts are worth their cost and unlikely ones are not."""
    tables = list(cache_dir.glob("cost-*.json"))
    assert tables, f"no server left a cost table in {cache_dir}"
    for path in tables:
        table = json.loads(path.read_text())
        verify = table["verify"]
        verify["ms"] = [[20.0 + tokens for _ in verify["kv_tokens"]] for tokens in verify["tokens"]]
        table["draft"]["ms"] = [1.0 + index / 1000 for index in range(len(table["draft"]["ms"]))]
        path.write_text(json.dumps(table))


def make_drafting_hopeless(cache_dir: Path) -> None:
    """Rewrite every cost table of the folder so that no draft can ever earn what drafting costs."""
    make_dear(cache_dir)
    for path in cache_dir.glob("cost-*.json"):
        table = json.loads(path.read_text())
        table["draft"]["ms"] = [1e4 + index for index in range(len(table["draft"]["ms"]))]
        path.write_text(json.dumps(table))


def profiled(cache_dir: Path, target: Path, draft: Path, *arguments: str, log_dir: Path) -> Path:
    """Let a server profile itself once into ``cache_dir``, make its tokens dear, and return the folder."""
    with Server(target, *speculative(draft), *arguments, log_dir=log_dir, environment=environment(cache_dir)):
        pass
    make_dear(cache_dir)
    return cache_dir
