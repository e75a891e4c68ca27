"""The record of a soak that is run in chunks: a JSON file that is whole at every moment."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from sglang_adaptive.errors import AdaptiveError

SUMS = ("steps", "requests", "short_requests", "seconds", "errors", "hangs", "leaks")


class SoakState:
    """Chunks of a soak in the order they ran; the last one is running. Without ``path`` nothing is written.

    Raises AdaptiveError where the file is something else.
    """

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self._path = path
        earlier: list[dict[str, Any]] = []
        if path is not None and path.exists():
            try:
                earlier = json.loads(path.read_text())["chunks"]
                totals([*earlier])
            except (ValueError, KeyError, TypeError) as error:
                raise AdaptiveError(f"{path} is not a soak's state: name another file with --state.") from error
        self.chunk: dict[str, Any] = {
            **about,
            **dict.fromkeys(SUMS, 0),
            "outcomes": {},
            "kv_tokens": {},
            "troubles": [],
        }
        self.chunks = [*earlier, self.chunk]

    def __getitem__(self, name: str) -> float:
        """One of ``SUMS``, over all chunks."""
        return sum(chunk[name] for chunk in self.chunks)

    def write(self) -> None:
        """Put the file in its place at once."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({**totals(self.chunks), "chunks": self.chunks}, indent=1) + "\n")
        os.replace(new, self._path)


def totals(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the chunks add up to: ``SUMS``, and what became of the requests."""
    outcomes: Counter[str] = Counter()
    for chunk in chunks:
        outcomes.update(chunk["outcomes"])
    return {name: round(sum(chunk[name] for chunk in chunks), 1) for name in SUMS} | {"outcomes": dict(outcomes)}


def merged(paths: list[Path]) -> dict[str, Any]:
    """The totals of several files, and KV tokens before and after each chunk."""
    chunks = [chunk for path in paths for chunk in json.loads(path.read_text())["chunks"]]
    held = [(chunk["kv_tokens"].get("before"), chunk["kv_tokens"].get("after")) for chunk in chunks]
    return {"files": len(paths), "chunks": len(chunks), **totals(chunks), "kv_tokens": sorted(set(held), key=str)}
