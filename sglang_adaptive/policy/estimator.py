"""Confidences from the draft distribution itself, for drafters without a confidence head or beside one.

On traces of SmolLM2-135M with its draft (benchmarks/results/calibration-2026-11-30.md) the features rank greedy drafts
with an AUC of 0.81, position alone with 0.53. Each of the smaller ones was kept because it lowered the Brier score on
greedy, sampled and mixed traffic alike. Beside a head they take the AUC of greedy drafts from 0.79 to 0.85, and that of
sampled ones from 0.65 to 0.66.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_adaptive.policy.gather import Gather
from sglang_adaptive.policy.logistic import LOGIT_LIMIT, LogisticFilter, logit, sigmoid

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]

_ENTROPY_LIMIT = 12.0
# Constant, log-odds of the maximum, entropy, recent acceptance, log-odds of the maximum one position before, and for
# sampled requests the constant, log-odds and entropy once more: a sampled draft is accepted by other rules than the
# likeliest one. At first the drafter's own maximum is believed.
_PRIOR_MEAN = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
_PRIOR_PRECISION = (4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0)
_TIE = 32.0
# Beside a head, which is believed at first: its log-odds come last.
_HEAD_MEAN = (*(0.0,) * len(_PRIOR_MEAN), 1.0)
_HEAD_PRECISION = (8.0,) * len(_HEAD_MEAN)


def features(
    max_probability: Floats,
    entropy: Floats,
    recent: Floats,
    temperature: Floats | None = None,
    head: Floats | None = None,
) -> Floats:
    """[R, K, 8] from the maximum and the entropy (nats) of each draft distribution [R, K], ``recent`` [R] and the
    requests' temperatures [R], 0 for greedy ones (None: all are); [R, K, 9] with the confidences of a ``head`` [R, K].

    ``recent`` is ``AcceptanceHistory.relative``. Prefix-only: the distribution of position j depends on the draft
    tokens before j. The probability of the token that was drawn at j must never be used: it would anticipate.
    """
    odds = logit(_contained(max_probability))
    spread = np.clip(np.asarray(entropy, np.float64), 0.0, _ENTROPY_LIMIT)
    sampled = np.zeros_like(recent) if temperature is None else np.clip(np.nan_to_num(temperature), 0.0, 1.0)
    seen = np.empty((*odds.shape, len(_PRIOR_MEAN)))
    seen[..., 0], seen[..., 1], seen[..., 2] = 1.0, odds, spread
    seen[..., 3], seen[:, 0, 4], seen[:, 1:, 4] = recent[:, None], 0.0, odds[:, :-1]
    np.multiply(seen[..., :3], sampled[:, None, None], out=seen[..., 5:])
    return seen if head is None else np.concatenate([seen, logit(_contained(head))[..., None]], axis=2)


def _contained(probability: Floats) -> Floats:
    """float64, NaN where it is no probability."""
    probability = np.asarray(probability, np.float64)
    return np.where((probability >= 0.0) & (probability <= 1.0), probability, np.nan)


class Estimator:
    """Per-position logistic regression on ``features``; believes the drafter's maximum until enough is seen, or its
    ``head`` where there is one.

    Without a head a position leans on the one before it. The confidence head's ``Calibration`` does not: there each
    position is off in its own way, while the meaning of a draft distribution hardly depends on where in the block it
    is.
    """

    def __init__(self, gamma: int, head: bool = False) -> None:
        mean, precision = (_HEAD_MEAN, _HEAD_PRECISION) if head else (_PRIOR_MEAN, _PRIOR_PRECISION)
        self._filter = LogisticFilter(gamma, np.array(mean), np.array(precision), tie=0.0 if head else _TIE)
        self._gather = Gather()

    @property
    def coefficients(self) -> Floats:
        """[8, K] for ``estimate_on_device``, [9, K] with a head."""
        return np.ascontiguousarray(self._filter.weights.T)

    @property
    def version(self) -> int:
        """Changes whenever ``coefficients`` may have changed."""
        return self._filter.version

    def confidence(self, seen: Floats) -> Floats:
        """[R, K] confidences from ``features``; NaN where a feature is NaN."""
        return sigmoid(np.einsum("rkd,kd->rk", seen, self._filter.weights))

    def observe(self, seen: Floats, verified: Ints, accepted: Ints, steps: int | None = None) -> None:
        """Learn from one step: its ``features``, drafts ``verified`` [R] and of those ``accepted`` [R].

        Steps of few requests wait for each other, unless the caller already put so many ``steps`` together.
        """
        if steps is not None:
            self._filter.observe(seen, verified, accepted, steps)
            return
        together = self._gather.add(seen, verified, accepted)
        if together is not None:
            steps, (seen, verified, accepted) = together
            self._filter.observe(seen, verified, accepted, steps)

    def to_dict(self) -> dict[str, Any]:
        """What was learned, as plain JSON values."""
        return self._filter.to_dict()

    def load_dict(self, record: Mapping[str, Any]) -> None:
        """Take over a ``to_dict``; raises ``ValueError`` and changes nothing when it does not fit."""
        self._filter.load_dict(record)


def estimate_on_device(
    max_probability: torch.Tensor,
    entropy: torch.Tensor,
    recent: torch.Tensor,
    coefficients: torch.Tensor,
    temperature: torch.Tensor | None = None,
    head: torch.Tensor | None = None,
) -> torch.Tensor:
    """``Estimator.confidence`` in torch: [R, K], [R, K], [R], [8, K], [R] and [R, K], all float32, to [R, K].

    With the confidences of a ``head`` the coefficients are [9, K].
    """
    inside = (max_probability >= 0) & (max_probability <= 1)
    odds = _odds(max_probability)
    spread = entropy.clamp(0.0, _ENTROPY_LIMIT)
    constant, slope, entropy_weight, recent_weight, before_weight, *for_sampled = coefficients.unbind(0)
    if head is not None:
        inside = inside & (head >= 0) & (head <= 1)
        constant = constant + for_sampled.pop() * _odds(head)
    if temperature is not None:
        sampled = temperature.clamp(0.0, 1.0).unsqueeze(1)
        constant = constant + sampled * for_sampled[0]
        slope = slope + sampled * for_sampled[1]
        entropy_weight = entropy_weight + sampled * for_sampled[2]
    total = constant + slope * odds + entropy_weight * spread + recent_weight * recent.unsqueeze(1)
    before = torch.nn.functional.pad(odds[:, :-1], (1, 0))
    return torch.sigmoid(total + before_weight * before).masked_fill(~inside, float("nan"))


def _odds(probability: torch.Tensor) -> torch.Tensor:
    return torch.log(probability / (1 - probability)).clamp(-LOGIT_LIMIT, LOGIT_LIMIT)
