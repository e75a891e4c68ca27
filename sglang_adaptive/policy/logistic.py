"""Online logistic regression per draft position, learned from what verification says about draft tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]

LOGIT_LIMIT = 12.0
_NEWTON_STEPS = 8
_TOLERANCE = 1e-6
_LEAST_DAMPING = 1e-3
_MAX_WEIGHT = 1e3


def logit(probability: Floats) -> Floats:
    """Log-odds, limited to +-12; NaN stays NaN."""
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = np.log(probability / (1.0 - probability))
    return np.asarray(np.clip(odds, -LOGIT_LIMIT, LOGIT_LIMIT))


def sigmoid(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(-x)))


class LogisticFilter:
    """P(accepted) = sigmoid(weights[position] . features), one weight vector per position.

    Samples gather in a buffer; now and then damped Newton steps find the weights that fit them, what earlier samples
    said and the prior. Earlier samples are kept as the quadratic that their likelihood was near those weights
    (Laplace's approximation, e.g. MacKay 2003, ch. 27), and fade, so that about ``memory`` samples per position count.
    The prior, a Gaussian around ``prior_mean``, never fades and is never folded into what was learned: it counts once.
    Until a position has ``min_samples`` it stays at the prior mean exactly. With a ``tie`` above 0, the prior of every
    position but the first is centred at the weights of the position before, and is ``tie`` times as precise: where
    drafts are trimmed, deep positions are seen too rarely to learn alone.

    The cost is bounded: at most ``buffer_rows`` rows are kept between two updates, which are ``update_steps`` steps
    apart, or as many more as it takes to see ``update_rows`` rows. The first updates come after 1, 2, 4, ... steps:
    what is believed at the start may be far off.
    """

    def __init__(
        self,
        positions: int,
        prior_mean: Floats,
        prior_precision: Floats,
        *,
        tie: float = 0.0,
        min_samples: int = 24,
        memory: int = 20_000,
        buffer_rows: int = 2048,
        update_steps: int = 16,
        update_rows: int = 64,
    ) -> None:
        self.positions, self.dimensions = positions, prior_mean.size
        self.min_samples, self.memory = min_samples, memory
        self.update_steps, self.update_rows = update_steps, min(update_rows, buffer_rows)
        self.prior_mean = np.asarray(prior_mean, np.float64)
        self.prior_precision = np.diag(np.asarray(prior_precision, np.float64))
        self._tie = tie
        self.samples = np.zeros(positions, np.int64)
        self.version = 0
        self._mean = np.tile(self.prior_mean, (positions, 1))
        # The earlier samples' log-likelihood: -w.precision.w / 2 + information.w
        self._precision = np.zeros((positions, self.dimensions, self.dimensions))
        self._information = np.zeros((positions, self.dimensions))
        self._x = np.zeros((buffer_rows, self.dimensions))
        self._y = np.zeros(buffer_rows)
        self._position = np.zeros(buffer_rows, np.int64)
        self._rows = 0
        self._steps = 0
        self._interval = 1
        self._pending: deque[tuple[int, Floats, Floats]] = deque()

    @property
    def weights(self) -> Floats:
        """[K, D] weights in force; ``version`` counts their changes."""
        ready = self.samples >= self.min_samples
        if not self._tie:
            return np.where(ready[:, None], self._mean, self.prior_mean)
        weights = self._mean.copy()
        for position in np.flatnonzero(~ready):
            weights[position] = weights[position - 1] if position else self.prior_mean
        return weights

    @property
    def curvature(self) -> Floats:
        """[K, D, D] Hessian of what the weights minimise, at the weights; without ties."""
        return self._precision + self.prior_precision

    @property
    def has_room(self) -> bool:
        """False while the buffer is full: building features would be in vain, ``observe_nothing`` will do."""
        return self._rows < self._y.size

    def observe_nothing(self, steps: int = 1) -> None:
        """Count ``steps`` whose outcomes are not taken."""
        self._steps += steps
        # A few positions per call, so that no single step pays for all of them.
        share = -(-self.positions * steps // self._interval)
        if self._steps >= self._interval and self._rows >= self.update_rows:
            self._set_out()
            self._interval = min(2 * self._interval, self.update_steps)
        for _ in range(min(len(self._pending), share)):
            position, x, y = self._pending.popleft()
            self._absorb(position, x, y)
            self.samples[position] += y.size
            self.version += 1

    def observe(self, features: Floats, verified: Ints, accepted: Ints, steps: int = 1) -> None:
        """Take the outcomes of one step, or of ``steps`` one below the other.

        ``features`` [R, K, D] of the drafts; of each request ``verified`` [R] drafts were checked and ``accepted`` [R]
        of those passed. Accepted drafts and the first rejected one are outcomes; later and trimmed drafts say nothing
        (censored). Rows with a feature that is not finite are dropped.
        """
        room = self._y.size - self._rows
        if room and verified.size:
            position = np.arange(self.positions)
            seen = (position <= accepted[:, None]) & (position < verified[:, None])
            seen &= np.isfinite(features).all(axis=2)
            row, column = np.nonzero(seen)
            # Buffer nearly full: spread what still fits over all requests instead of taking the first ones.
            if row.size > room:
                keep = np.arange(room) * row.size // room
                row, column = row[keep], column[keep]
            into = slice(self._rows, self._rows + row.size)
            self._x[into] = features[row, column]
            self._y[into] = column < accepted[row]
            self._position[into] = column
            self._rows += row.size
        self.observe_nothing(steps)

    def _set_out(self) -> None:
        position = self._position[: self._rows]
        for mine in range(self.positions):
            rows = np.flatnonzero(position == mine)
            if rows.size:
                self._pending.append((mine, self._x[rows], self._y[rows]))
        self._rows = self._steps = 0

    def _absorb(self, position: int, x: Floats, y: Floats) -> None:
        fade = max(0.0, 1.0 - y.size / self.memory)
        past, pull = fade * self._precision[position], fade * self._information[position]
        tied = bool(self._tie) and position > 0
        centre = self.weights[position - 1] if tied else self.prior_mean
        prior = self._tie * self.prior_precision if tied else self.prior_precision
        weights = self._mean[position]

        def loss_at(weights: Floats) -> float:
            z, away = x @ weights, weights - centre
            earlier = 0.5 * weights @ past @ weights - pull @ weights
            return float(np.logaddexp(0.0, z).sum() - y @ z + earlier + 0.5 * away @ prior @ away)

        loss = loss_at(weights)
        for _ in range(_NEWTON_STEPS):
            gradient, hessian = _likelihood(weights, x, y)
            gradient = gradient + past @ weights - pull + prior @ (weights - centre)
            step = np.linalg.solve(hessian + past + prior, gradient)
            damping = 1.0
            while damping > _LEAST_DAMPING:
                trial = weights - damping * step
                trial_loss = loss_at(trial)
                if trial_loss <= loss:
                    break
                damping /= 2.0
            else:
                break
            weights, improved, loss = trial, loss - trial_loss, trial_loss
            if improved < _TOLERANCE:
                break
        gradient, hessian = _likelihood(weights, x, y)
        self._mean[position] = weights
        self._precision[position] = past + hessian
        self._information[position] = pull + hessian @ weights - gradient

    def to_dict(self) -> dict[str, Any]:
        """What was learned, as plain JSON values."""
        return {
            "mean": self._mean.tolist(),
            "precision": self._precision.tolist(),
            "information": self._information.tolist(),
            "samples": self.samples.tolist(),
        }

    def load_dict(self, record: Mapping[str, Any]) -> None:
        """Take over a ``to_dict``. Raises ``ValueError`` and changes nothing when it does not fit or is not sane."""
        try:
            mean, precision = np.array(record["mean"], np.float64), np.array(record["precision"], np.float64)
            information, samples = np.array(record["information"], np.float64), np.array(record["samples"], np.int64)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError("The saved regression is broken; it has to be learned again.") from error
        pairs = ((mean, self._mean), (precision, self._precision), (information, self._information))
        if any(new.shape != old.shape for new, old in pairs) or samples.shape != self.samples.shape:
            raise ValueError("The saved regression is for another draft length; it has to be learned again.")
        sane = all(np.isfinite(new).all() for new, _ in pairs) and bool((samples >= 0).all())
        if not sane or (np.abs(mean) > _MAX_WEIGHT).any() or not _is_precision(precision):
            raise ValueError("The saved regression holds impossible values; it has to be learned again.")
        self._mean, self._precision, self._information, self.samples = mean, precision, information, samples
        self.version += 1


def _likelihood(weights: Floats, x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Gradient and Hessian of the negative log-likelihood."""
    p = sigmoid(x @ weights)
    return x.T @ (p - y), (x.T * (p * (1.0 - p))) @ x


def _is_precision(matrices: Floats) -> bool:
    largest = max(1.0, float(np.abs(matrices).max()))
    symmetric = np.allclose(matrices, matrices.transpose(0, 2, 1), atol=1e-9 * largest)
    return bool(symmetric and np.linalg.eigvalsh(matrices).min() >= -1e-9 * largest)
