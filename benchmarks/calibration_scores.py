"""Scores of confidences against what verification found: ECE, AUC, Brier, and how far chance alone explains them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BINS = 10
_DRAWS = 200


@dataclass(frozen=True)
class Outcomes:
    """Drafts whose fate is known: confidences ``predicted`` [n], ``passed`` [n] bool, and whose they are, ``request``
    [n], numbers from 0."""

    predicted: np.ndarray
    passed: np.ndarray
    request: np.ndarray

    def where(self, mask: np.ndarray) -> Outcomes:
        return Outcomes(self.predicted[mask], self.passed[mask], self.request[mask])


def scores(of: Outcomes, seed: int = 0) -> dict[str, float]:
    """``n``, ``ece``, ``auc``, ``brier``, and of the ECE:

    * ``ece_low``, ``ece_high``: 95 % interval over requests drawn with replacement (outcomes of one request depend on
      each other),
    * ``chance``, ``chance_high``: mean and 97.5 % quantile of the ECE that exact confidences would show on so many
      outcomes,
    * ``rms``: the root mean square of the bins' gaps without what chance adds to it. The ECE without chance is no more.
    """
    bins = equal_bins(of.predicted)
    rng = np.random.default_rng(seed)
    exact = [ece(of.predicted, rng.random(of.predicted.size) < of.predicted, bins) for _ in range(_DRAWS)]
    resampled = ece_over_requests(of, bins, seed)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return {
        "n": float(of.predicted.size),
        "ece": ece(of.predicted, of.passed, bins),
        "ece_low": float(low),
        "ece_high": float(high),
        "chance": float(np.mean(exact)),
        "chance_high": float(np.quantile(exact, 0.975)),
        "rms": unbiased_rms(of.predicted, of.passed, bins),
        "auc": auc(of.predicted, of.passed),
        "brier": float(np.mean((of.predicted - of.passed) ** 2)),
    }


def equal_bins(predicted: np.ndarray) -> list[np.ndarray]:
    """Indices of at most ten bins of equal count, by confidence."""
    return np.array_split(np.argsort(predicted, kind="stable"), min(BINS, predicted.size))


def ece(predicted: np.ndarray, passed: np.ndarray, bins: Sequence[np.ndarray]) -> float:
    """Expected calibration error: |mean prediction - rate| averaged over the bins' indices, by their size."""
    gaps = [abs(predicted[part].mean() - passed[part].mean()) * part.size for part in bins]
    return float(sum(gaps) / predicted.size)


def unbiased_rms(predicted: np.ndarray, passed: np.ndarray, bins: Sequence[np.ndarray]) -> float:
    """Root of the bins' mean squared gap, each less the variance of its rate (Kumar et al. 2019, arXiv 1909.10155)."""
    total = 0.0
    for part in bins:
        rate = float(passed[part].mean())
        gap = float(predicted[part].mean()) - rate
        total += part.size * (gap * gap - rate * (1.0 - rate) / max(part.size - 1, 1))
    return float(np.sqrt(max(total / predicted.size, 0.0)))


def ece_over_requests(of: Outcomes, bins: Sequence[np.ndarray], seed: int = 0) -> np.ndarray:
    """[draws] ECE of as many requests drawn with replacement; the same requests for the same seed and ``request``."""
    owners, owner = np.unique(of.request, return_inverse=True)
    bin_of = np.empty(of.predicted.size, np.int64)
    for number, part in enumerate(bins):
        bin_of[part] = number
    gap = np.zeros((owners.size, len(bins)))
    np.add.at(gap, (owner, bin_of), of.predicted - of.passed)
    weights = np.random.default_rng(seed).multinomial(owners.size, np.full(owners.size, 1.0 / owners.size), _DRAWS)
    return np.abs(weights @ gap).sum(axis=1) / (weights @ np.bincount(owner))


def auc(predicted: np.ndarray, passed: np.ndarray) -> float:
    """Probability that a passed draft is ranked above a failed one, ties half; NaN with one class only."""
    good = int(passed.sum())
    if not 0 < good < passed.size:
        return float("nan")
    _, place, count = np.unique(predicted, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2
    return float((rank[place][passed].sum() - good * (good + 1) / 2) / (good * (passed.size - good)))
