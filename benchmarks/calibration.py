"""How well confidences agree with what verification finds, on recorded traces.

Only decided drafts count: the accepted ones and the first rejected one of each request and step. Everything later or
trimmed says nothing. Each method predicts a step before it learns from it. Judged is what comes after the first 2,000
steps, or after the first quarter of a trace that is shorter than 8,000.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sglang_adaptive.benchmarks.calibration_methods import METHODS, NEED_FEATURES, Steps, trimmed
from sglang_adaptive.benchmarks.calibration_plot import draw
from sglang_adaptive.benchmarks.calibration_scores import Outcomes, ece_over_requests, equal_bins, scores
from sglang_adaptive.benchmarks.simulator.tables import load_table
from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.runtime.trace import read_trace

VIEWS: dict[str, Callable[[Steps], Steps]] = {
    "all": lambda steps: steps,
    "greedy": lambda steps: steps.only(sampled=False),
    "sampled": lambda steps: steps.only(sampled=True),
    "mixed": lambda steps: steps.only(sampled=False).beside(steps.only(sampled=True)),
}
DRAWN = ("raw head", "online", "headless")
_LEAST = 50
_LEARNED = 2000

Result = dict[str, dict[str, dict[str, float]]]


def evaluate(steps: Steps, judge: slice | None = None, cost: CostModel | None = None) -> Result:
    """By method and label (position "1".."K", "all", and where temperatures are known "greedy" and "sampled"): what
    ``calibration_scores.scores`` gives, and ``above_raw``, the share of resamplings in which the ECE is above that of
    the raw head. Labels with fewer than 50 outcomes are left out.

    ``judge`` says which steps are judged; those before are learned from. With ``cost``, the methods learn only from
    what the engine would have verified under it; judged they are on everything that is known.
    """
    judged = Judged(steps, judge or by_default(steps))
    seen = steps if cost is None else trimmed(steps, cost)
    result: Result = {}
    raw: dict[str, np.ndarray] = {}
    for name, method in METHODS.items():
        if name in NEED_FEATURES and not steps.has_features:
            continue
        result[name] = {}
        for label, outcomes in judged.outcomes(method(seen, judged.steps.start)).items():
            resampled = ece_over_requests(outcomes, equal_bins(outcomes.predicted))
            raw.setdefault(label, resampled)
            result[name][label] = scores(outcomes) | {"above_raw": float((resampled > raw[label]).mean())}
    return result


def by_default(steps: Steps) -> slice:
    """The steps that are judged where nothing else is asked."""
    return slice(min(_LEARNED, len(steps) // 4), len(steps))


class Judged:
    """The known outcomes of some steps of a trace."""

    def __init__(self, steps: Steps, rest: slice) -> None:
        self.steps, self._gamma = rest, steps.gamma
        self._known = np.concatenate(steps.decided()[rest])
        self._passed = np.concatenate([np.arange(steps.gamma) < accepted[:, None] for accepted in steps.accepted[rest]])
        owners = np.stack([np.concatenate(steps.slots[rest]), np.concatenate(steps.generations[rest])], axis=1)
        self._request = np.unique(owners, axis=0, return_inverse=True)[1].reshape(-1)
        self._temperature = np.concatenate(steps.temperature[rest])

    def outcomes(self, predicted: list[np.ndarray]) -> dict[str, Outcomes]:
        """The outcomes by label, with the confidences ``predicted`` per step [R, K]."""
        table = np.concatenate(predicted[self.steps])
        usable = self._known & np.isfinite(table)
        position = np.broadcast_to(np.arange(self._gamma), table.shape)
        temperature = np.broadcast_to(self._temperature[:, None], table.shape)
        labels = {str(j + 1): position == j for j in range(self._gamma)} | {"all": position >= 0}
        labels |= {"greedy": temperature == 0, "sampled": temperature > 0}
        request = np.broadcast_to(self._request[:, None], table.shape)
        everything = Outcomes(table[usable], self._passed[usable], request[usable])
        found = {label: everything.where(mask[usable]) for label, mask in labels.items()}
        return {label: outcomes for label, outcomes in found.items() if outcomes.predicted.size >= _LEAST}


def table(result: Result) -> str:
    """A markdown table: a line per method and label."""
    lines = [
        "| method | position | outcomes | ECE | 95 % | ECE by chance | RMS | AUC | Brier |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, positions in result.items():
        for label, s in positions.items():
            spread = f"{s['ece_low']:.4f} to {s['ece_high']:.4f}"
            rest = " | ".join(f"{s[key]:.4f}" for key in ("chance", "rms", "auc", "brier"))
            lines.append(f"| {name} | {label} | {s['n']:.0f} | {s['ece']:.4f} | {spread} | {rest} |")
    return "\n".join(lines)


def _steps(text: str) -> slice:
    begin, end = text.split(":")
    return slice(int(begin or 0), int(end) if end else None)


def main(argv: Sequence[str]) -> int:
    """Score the confidences of recorded traces."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_adaptive.benchmarks calibration", description=__doc__.splitlines()[0]
    )
    parser.add_argument("traces", nargs="+", type=Path, help="files that the server option trace wrote")
    parser.add_argument("--judge", type=_steps, metavar="FROM:TO", help="judge these steps, learn from those before")
    parser.add_argument(
        "--only",
        choices=VIEWS,
        default="all",
        help="only the greedy or the sampled requests, or both of them side by side in every step",
    )
    parser.add_argument("--trim", metavar="TABLE", help="learn only from what the policy verifies under a cost table")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--picture", type=Path, help="write reliability curves there (PNG)")
    arguments = parser.parse_args(argv)
    cost = load_table(arguments.trim)[0] if arguments.trim else None
    results: dict[str, Any] = {}
    for path in arguments.traces:
        steps = VIEWS[arguments.only](Steps.of(read_trace(path)))
        judge = by_default(steps) if arguments.judge is None else slice(*arguments.judge.indices(len(steps)))
        results[path.name] = evaluate(steps, judge, cost)
        rows = sum(len(raw) for raw in steps.raw)
        judged = f"judged are steps {judge.start} to {judge.stop}"
        print(f"{path.name}: {len(steps)} drafted steps, {rows} requests in them, {judged}\n")
        print(table(results[path.name]) + "\n")
        if arguments.picture:
            judged_steps = Judged(steps, judge)
            curves = {
                name: judged_steps.outcomes(METHODS[name](steps, judge.start))
                for name in DRAWN
                if steps.has_features or name not in NEED_FEATURES
            }
            draw(curves, f"{path.name}: confidence and rate of acceptance", arguments.picture)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
