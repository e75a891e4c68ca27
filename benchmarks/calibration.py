"""How well confidences agree with what verification finds, on recorded traces.

Only decided drafts count: the accepted ones and the first rejected one of each request and step. Everything later or
trimmed says nothing. Each method predicts a step before it learns from it; what is fitted once (the static
temperatures) is fitted on the first quarter of the steps, and all methods are judged on the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.policy.calibration import Calibration
from sglang_adaptive.policy.estimator import Estimator, features
from sglang_adaptive.policy.history import AcceptanceHistory
from sglang_adaptive.policy.logistic import LogisticFilter, logit, sigmoid
from sglang_adaptive.runtime.trace import Trace, read_trace

BINS = 10
_LEAST = 50
_FLOOR_DRAWS = 50


@dataclass(frozen=True)
class Steps:
    """The drafted steps of a trace, in order: per step raw confidences [R, K], drafts verified and accepted [R], slots
    and generations [R], and the draft distributions' maxima and entropies [R, K] (NaN where not recorded)."""

    gamma: int
    raw: list[np.ndarray]
    verified: list[np.ndarray]
    accepted: list[np.ndarray]
    slots: list[np.ndarray]
    generations: list[np.ndarray]
    maxima: list[np.ndarray]
    entropy: list[np.ndarray]

    @staticmethod
    def of(trace: Trace) -> Steps:
        """Raises AdaptiveError for a trace without drafts."""
        parts: list[tuple[np.ndarray, ...]] = []
        for begin, end in zip(trace.start[:-1], trace.start[1:], strict=True):
            rows, raw = trace.rows[begin:end], trace.confidence[begin:end]
            if end > begin and np.isfinite(raw).any():
                counts = (rows["verified"].astype(np.int64), rows["accepted"].astype(np.int64))
                owner = (rows["slot"].astype(np.int64), rows["generation"].astype(np.int64))
                parts.append(
                    (raw.astype(float), *counts, *owner, trace.max_probability[begin:end], trace.entropy[begin:end])
                )
        if not parts:
            raise AdaptiveError("The trace has no step that drafted; record one under a load at which drafting pays.")
        return Steps(trace.gamma, *map(list, zip(*parts, strict=True)))

    @property
    def has_features(self) -> bool:
        return bool(np.isfinite(self.maxima[0]).any() and np.isfinite(self.entropy[0]).any())

    def decided(self) -> list[np.ndarray]:
        """[R, K] bool per step: the drafts whose fate is known."""
        position = np.arange(self.gamma)
        return [
            (position <= accepted[:, None]) & (position < verified[:, None])
            for verified, accepted in zip(self.verified, self.accepted, strict=True)
        ]


def raw_head(steps: Steps) -> list[np.ndarray]:
    return steps.raw


def static_temperature(steps: Steps) -> list[np.ndarray]:
    """One temperature per position, the best of a grid (log loss) on the first quarter."""
    grid = np.exp(np.linspace(np.log(0.2), np.log(5.0), 65))
    odds, passed, known = (_stacked(steps, part, _first_quarter(steps)) for part in ("odds", "passed", "decided"))
    temperatures = np.ones(steps.gamma)
    for j in range(steps.gamma):
        mine = known[:, j]
        if mine.any():
            scaled = odds[mine, j] / grid[:, None]
            losses = np.logaddexp(0.0, scaled).mean(axis=1) - (scaled * passed[mine, j]).mean(axis=1)
            temperatures[j] = grid[int(np.argmin(losses))]
    return [sigmoid(logit(raw) / temperatures) for raw in steps.raw]


def position_means(steps: Steps) -> list[np.ndarray]:
    """The running acceptance rate of each position (one of two at first)."""
    passed, seen, result = np.full(steps.gamma, 1.0), np.full(steps.gamma, 2.0), []
    for raw, accepted, known in zip(steps.raw, steps.accepted, steps.decided(), strict=True):
        result.append(np.tile(passed / seen, (len(raw), 1)))
        passed += (known & (np.arange(steps.gamma) < accepted[:, None])).sum(axis=0)
        seen += known.sum(axis=0)
    return result


def online_calibration(steps: Steps) -> list[np.ndarray]:
    """The engine's ``Calibration``."""
    calibration, result = Calibration(steps.gamma), []
    for raw, verified, accepted in zip(steps.raw, steps.verified, steps.accepted, strict=True):
        result.append(calibration.apply(raw))
        calibration.observe(raw, verified, accepted)
    return result


def online_with_recent(steps: Steps) -> list[np.ndarray]:
    """The same regression, with the request's recent acceptance (``AcceptanceHistory``) as one more feature."""
    learner = LogisticFilter(steps.gamma, np.array([0.0, 1.0, 0.0]), np.array([8.0, 16.0, 8.0]))
    history, result = _history(steps), []
    for n, raw in enumerate(steps.raw):
        recent = history.relative(steps.slots[n], steps.generations[n])
        odds = logit(raw)
        seen = np.stack([np.ones_like(odds), odds, np.broadcast_to(recent[:, None], odds.shape)], axis=2)
        result.append(sigmoid(np.einsum("rkd,kd->rk", seen, learner.weights)))
        learner.observe(seen, steps.verified[n], steps.accepted[n])
        history.observe(steps.slots[n], steps.generations[n], steps.verified[n], steps.accepted[n])
    return result


def headless(steps: Steps) -> list[np.ndarray]:
    """The engine's ``Estimator`` for drafters without a head: nothing of the head is looked at."""
    estimator, history, result = Estimator(steps.gamma), _history(steps), []
    for n in range(len(steps.raw)):
        recent = history.relative(steps.slots[n], steps.generations[n])
        seen = features(steps.maxima[n], steps.entropy[n], recent)
        result.append(estimator.confidence(seen))
        estimator.observe(seen, steps.verified[n], steps.accepted[n])
        history.observe(steps.slots[n], steps.generations[n], steps.verified[n], steps.accepted[n])
    return result


METHODS: dict[str, Callable[[Steps], list[np.ndarray]]] = {
    "raw head": raw_head,
    "static temperature": static_temperature,
    "position means": position_means,
    "online": online_calibration,
    "online + recent": online_with_recent,
    "headless": headless,
}


def evaluate(steps: Steps) -> dict[str, dict[str, dict[str, float]]]:
    """By method and position ("1".."K" and "all"): n, ece, floor (the ECE that so many outcomes would show by chance if
    the confidences were exact), auc, brier. Positions with fewer than 50 outcomes are left out."""
    first = _first_quarter(steps)
    known = np.concatenate(steps.decided()[first:])
    passed = np.concatenate([np.arange(steps.gamma) < accepted[:, None] for accepted in steps.accepted[first:]])
    result: dict[str, dict[str, dict[str, float]]] = {}
    for name, method in METHODS.items():
        if method is headless and not steps.has_features:
            continue
        predicted = np.concatenate(method(steps)[first:])
        usable = known & np.isfinite(predicted)
        result[name] = {}
        for label, columns in [*((str(j + 1), [j]) for j in range(steps.gamma)), ("all", list(range(steps.gamma)))]:
            mine = usable[:, columns]
            if mine.sum() >= _LEAST:
                result[name][label] = scores(predicted[:, columns][mine], passed[:, columns][mine])
    return result


def scores(predicted: np.ndarray, passed: np.ndarray) -> dict[str, float]:
    """Scores of predictions [n] against outcomes [n]; ECE over ten bins of equal count."""
    rng = np.random.default_rng(0)
    order = np.argsort(predicted, kind="stable")
    bins = np.array_split(order, min(BINS, predicted.size))
    draws = [ece(predicted, rng.random(predicted.size) < predicted, bins) for _ in range(_FLOOR_DRAWS)]
    return {
        "n": float(predicted.size),
        "ece": ece(predicted, passed, bins),
        "floor": float(np.mean(draws)),
        "auc": auc(predicted, passed),
        "brier": float(np.mean((predicted - passed) ** 2)),
    }


def ece(predicted: np.ndarray, passed: np.ndarray, bins: Sequence[np.ndarray]) -> float:
    """Expected calibration error: |mean prediction - rate| averaged over the bins' indices, by their size."""
    gaps = [abs(predicted[part].mean() - passed[part].mean()) * part.size for part in bins]
    return float(sum(gaps) / predicted.size)


def auc(predicted: np.ndarray, passed: np.ndarray) -> float:
    """Probability that a passed draft is ranked above a failed one, ties half; NaN with one class only."""
    good = int(passed.sum())
    if not 0 < good < passed.size:
        return float("nan")
    _, place, count = np.unique(predicted, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2
    return float((rank[place][passed].sum() - good * (good + 1) / 2) / (good * (passed.size - good)))


def table(result: dict[str, dict[str, dict[str, float]]]) -> str:
    """A markdown table: a line per method and position."""
    lines = ["| method | position | outcomes | ECE | ECE by chance | AUC | Brier |", "| --- | ---: |" + " ---: |" * 5]
    for name, positions in result.items():
        for label, s in positions.items():
            shown = [f"{s[key]:.4f}" for key in ("ece", "floor", "auc", "brier")]
            lines.append(f"| {name} | {label} | {s['n']:.0f} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _first_quarter(steps: Steps) -> int:
    return len(steps.raw) // 4


def _stacked(steps: Steps, part: str, until: int) -> np.ndarray:
    if part == "decided":
        return np.concatenate(steps.decided()[: max(until, 1)])
    if part == "odds":
        return np.concatenate([logit(raw) for raw in steps.raw[: max(until, 1)]])
    return np.concatenate([np.arange(steps.gamma) < a[:, None] for a in steps.accepted[: max(until, 1)]])


def _history(steps: Steps) -> AcceptanceHistory:
    return AcceptanceHistory(int(max(slots.max() for slots in steps.slots)) + 1)


def main(argv: Sequence[str]) -> int:
    """Score the confidences of recorded traces."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_adaptive.benchmarks calibration", description=__doc__.splitlines()[0]
    )
    parser.add_argument("traces", nargs="+", type=Path, help="files that the server option trace wrote")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    arguments = parser.parse_args(argv)
    results: dict[str, Any] = {}
    for path in arguments.traces:
        steps = Steps.of(read_trace(path))
        results[path.name] = evaluate(steps)
        rows = sum(len(raw) for raw in steps.raw)
        print(f"{path.name}: {len(steps.raw)} drafted steps, {rows} requests in them\n\n{table(results[path.name])}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
