"""What a sweep's rows say: medians and spread per cell, and how our arm stands against the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sglang_adaptive.benchmarks.stats import geomean, median, spread

HEAVY = 48
LEAST = 0.98


class Results:
    """Rows of a results file by arm and concurrency; ``roles`` maps each arm to its role."""

    def __init__(self, rows: Sequence[dict[str, Any]], roles: dict[str, str]) -> None:
        self.cells: dict[tuple[str, int], dict[int, dict[str, Any]]] = defaultdict(dict)
        for row in rows:
            if row["kind"] == "cell":
                self.cells[row["arm"], row["concurrency"]][row["repeat"]] = row
        self.failures = [row for row in rows if row["kind"] == "failure"]
        traces = [row for row in rows if row["kind"] == "trace"]
        self.traces = list({(row["arm"], row["concurrency"]): row for row in traces}.values())
        measured = {arm for arm, _ in self.cells}
        self.roles = {arm: role for arm, role in roles.items() if arm in measured}
        self.arms = list(self.roles)
        self.concurrency = sorted({concurrency for _, concurrency in self.cells})

    def of_role(self, role: str) -> list[str]:
        """Names of the measured arms with that role."""
        return [arm for arm in self.arms if self.roles[arm] == role]

    def values(self, arm: str, concurrency: int, *path: str) -> list[float]:
        """One number of each repeat of a cell, found under ``path``; those that are missing are left out."""
        result = []
        for row in self.cells.get((arm, concurrency), {}).values():
            value: Any = row
            for name in path:
                value = (value or {}).get(name)
            if value is not None:
                result.append(value)
        return result

    def middle(self, arm: str, concurrency: int, *path: str) -> float | None:
        """The median over repeats of what ``values`` gives."""
        return median(self.values(arm, concurrency, *path))

    def best(self, arms: Sequence[str], concurrency: int) -> str | None:
        """Of ``arms`` the one with the highest median throughput there."""
        known = [arm for arm in arms if self.middle(arm, concurrency, "tok_s")]
        return max(known, key=lambda arm: self.middle(arm, concurrency, "tok_s") or 0.0, default=None)

    def versus(self, ours: str, other: str | None, concurrency: int) -> dict[str, Any] | None:
        """Throughput of ``ours`` over that of ``other``: the ratio of the medians, and the smallest and largest ratio
        of a single repeat, in which both ran with the same prompts."""
        mine, theirs = self.middle(ours, concurrency, "tok_s"), other and self.middle(other, concurrency, "tok_s")
        if other is None or not mine or not theirs:
            return None
        a, b = self.cells[ours, concurrency], self.cells[other, concurrency]
        paired = [a[repeat]["tok_s"] / b[repeat]["tok_s"] for repeat in sorted(a.keys() & b.keys())]
        return {
            "other": other,
            "ratio": mine / theirs,
            "low": min(paired, default=None),
            "high": max(paired, default=None),
            "noise": max(
                (s for arm in (ours, other) if (s := spread(self.values(arm, concurrency, "tok_s"))) is not None),
                default=None,
            ),
        }


def standing(results: Results, ours: str) -> dict[str, Any]:
    """How arm ``ours`` stands.

    ``cells`` has, per concurrency, the ratios against the best fixed length of that cell, no speculation and the best
    compact arm; ``geomean`` those over the cells, against the single fixed length that is best for the whole sweep
    (``fixed_single``) and against compact at a concurrency of 48 or more (``compact_heavy``) too; ``below`` lists
    (against what, concurrency, ratio) of ratios under 0.98.
    """
    fixed, none, compact = (results.of_role(role) for role in ("fixed", "none", "compact"))
    cells: dict[int, dict[str, Any]] = {}
    for c in results.concurrency:
        cells[c] = {
            "fixed": results.versus(ours, results.best(fixed, c), c),
            "none": results.versus(ours, results.best(none, c), c),
            "compact": results.versus(ours, results.best(compact, c), c),
        }
    single = best_single(results, fixed)
    against_single = [results.versus(ours, single, c) for c in results.concurrency]
    means = {name: _geomean(cells[c][name] for c in results.concurrency) for name in ("fixed", "none", "compact")}
    means["fixed_single"] = _geomean(against_single)
    means["compact_heavy"] = _geomean(cells[c]["compact"] for c in results.concurrency if c >= HEAVY)
    below = [
        (name, c, found["ratio"])
        for c in results.concurrency
        for name in ("fixed", "none", "compact")
        if (found := cells[c][name]) and found["ratio"] < LEAST
    ]
    return {"arm": ours, "best_single": single, "cells": cells, "geomean": means, "below": below}


def best_single(results: Results, arms: Sequence[str]) -> str | None:
    """The arm with the highest geometric mean of throughput over the concurrencies that all of them have."""
    shared = [c for c in results.concurrency if all(results.middle(arm, c, "tok_s") for arm in arms)]
    if not arms or not shared:
        return None
    return max(arms, key=lambda arm: geomean([results.middle(arm, c, "tok_s") or 0.0 for c in shared]) or 0.0)


def _geomean(found: Any) -> float | None:
    return geomean([item["ratio"] for item in found if item])


def pareto(results: Results) -> dict[str, list[dict[str, float]]]:
    """Per arm, one point per concurrency: throughput (tok/s) against what one user sees (tok/s)."""
    return {
        arm: [
            {"concurrency": c, "tok_s": total, "tok_s_user": user}
            for c in results.concurrency
            if (total := results.middle(arm, c, "tok_s")) and (user := results.middle(arm, c, "tok_s_user"))
        ]
        for arm in results.arms
    }
