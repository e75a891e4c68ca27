"""Corrects the profiled cost table from measured step times, robustly enough that no single step can matter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sglang_adaptive.policy.cost import CostModel

Floats = NDArray[np.float64]

WINDOW = 32
MIN_SAMPLES = 8
_FACTOR_RANGE = (0.25, 4.0)
_MIN_CONTEXT_SAMPLES = 64
_MIN_CONTEXT_SPREAD = 0.1
_MAX_CONTEXT_SHARE = 0.5
_HEAD = 2


class CostCorrection:
    """Windows of measured steps per tier, and the correction that follows from their medians.

    Corrected verify cost = factor[tier] * profiled + slope * (kv_tokens - kv_reference), made monotone again. A tier
    has its own factor once it was measured ``MIN_SAMPLES`` times, others take it from their neighbours. A tier that was
    not seen for ``forget_steps`` observed steps loses its factor, so that one that was slow for a while is tried again:
    at most ``MIN_SAMPLES`` times per ``forget_steps`` if it is still slow.
    """

    def __init__(self, profiled: CostModel, forget_steps: int = 4096) -> None:
        self.profiled = profiled
        self.forget_steps = forget_steps
        tiers = profiled.tiers.size
        self._verify, self._rest = np.zeros((tiers, WINDOW)), np.zeros((tiers, WINDOW))
        self._kv, self._measured = np.zeros((tiers, WINDOW)), np.zeros((tiers, WINDOW))
        self._count = np.zeros(tiers, np.int64)
        self._seen_at = np.zeros(tiers, np.int64)
        self._steps = 0

    @staticmethod
    def neutral(profiled: CostModel) -> Floats:
        """The state that changes nothing: context slope, KV reference, and one factor per tier."""
        return np.concatenate([np.zeros(_HEAD), np.ones(profiled.tiers.size)])

    def observe(
        self, requests: int, non_draft_tokens: int, draft_tokens: int, kv_tokens: float, drafted: bool, step_ms: float
    ) -> None:
        """Take one measured step. Times and contexts that are not finite, or not positive times, are dropped."""
        self._steps += 1
        tiers = self.profiled.tiers
        if not tiers.size or not (np.isfinite(step_ms) and step_ms > 0 and np.isfinite(kv_tokens)):
            return
        tokens = non_draft_tokens + draft_tokens
        tier = min(int(np.searchsorted(tiers, tokens)), tiers.size - 1)
        total = self.profiled.point_ms(requests, tokens, requests + draft_tokens, kv_tokens, drafted)
        verify = self.profiled.verify_cost(tokens, kv_tokens)
        at = self._count[tier] % WINDOW
        self._verify[tier, at], self._rest[tier, at] = verify, total - verify
        self._kv[tier, at], self._measured[tier, at] = kv_tokens, step_ms
        self._count[tier] += 1
        self._seen_at[tier] = self._steps

    def state(self) -> Floats:
        """[2 + tiers]: slope (ms per KV token), KV reference (tokens), factor per tier."""
        self._count[self._steps - self._seen_at > self.forget_steps] = 0
        state = self.neutral(self.profiled)
        known = np.flatnonzero(self._count >= MIN_SAMPLES)
        if not known.size:
            return state
        seen = _Window(self, known)
        slope, reference = seen.context()
        factors = seen.factors(slope, reference)
        scale = np.log(self.profiled.tiers)
        state[:_HEAD] = slope, reference
        state[_HEAD:] = np.exp(np.interp(scale, scale[known], np.log(factors)))
        return state


class _Window:
    """What the windows of some tiers hold: [tiers, WINDOW] each, of which ``count`` entries per row are filled."""

    def __init__(self, correction: CostCorrection, known: NDArray[np.intp]) -> None:
        self.verify, self.rest = correction._verify[known], correction._rest[known]
        self.kv, self.measured = correction._kv[known], correction._measured[known]
        self.count = np.minimum(correction._count[known], WINDOW)
        self.filled = np.arange(WINDOW) < self.count[:, None]

    def factors(self, slope: float, reference: float) -> Floats:
        """[tiers] measured over profiled verify cost."""
        context = slope * (self.kv - reference)
        ratios = (self.measured - self.rest - context) / np.maximum(self.verify, 1e-9)
        return np.clip(self._medians(ratios), *_FACTOR_RANGE)

    def context(self) -> tuple[float, float]:
        """Slope of what the tiers leave unexplained over KV tokens: Tukey's resistant line, medians of outer thirds."""
        predicted = self.verify + self.rest
        level = self._medians(self.measured / np.maximum(predicted, 1e-9))
        residual = self.measured - predicted * level[:, None]
        residual = (residual - self._medians(residual)[:, None])[self.filled]
        offset = (self.kv - self._medians(self.kv)[:, None])[self.filled]
        reference = float(np.median(self.kv[self.filled]))
        if residual.size < _MIN_CONTEXT_SAMPLES or reference <= 0:
            return 0.0, reference
        low, high = np.quantile(offset, [1 / 3, 2 / 3])
        lower, upper = offset <= low, offset >= high
        run = float(np.median(offset[upper]) - np.median(offset[lower]))
        if run < _MIN_CONTEXT_SPREAD * reference:
            return 0.0, reference
        slope = float(np.median(residual[upper]) - np.median(residual[lower])) / run
        limit = _MAX_CONTEXT_SHARE * float(np.median(predicted[self.filled])) / reference
        return float(np.clip(slope, -limit, limit)), reference

    def _medians(self, values: Floats) -> Floats:
        """[tiers] medians of the filled entries."""
        ordered = np.sort(np.where(self.filled, values, np.inf), axis=1)
        row = np.arange(self.count.size)
        return np.asarray(0.5 * (ordered[row, (self.count - 1) // 2] + ordered[row, self.count // 2]))


def corrected(profiled: CostModel, state: Floats) -> CostModel:
    """The table with a ``CostCorrection.state`` in force. Costs stay positive, and monotone over tokens and context."""
    slope, reference, factors = float(state[0]), float(state[1]), state[_HEAD:]
    table, points, verify = profiled, profiled.kv_points, profiled.verify_ms
    if slope and points.size == 1:
        # One profiled context has no slope of its own: a second point carries the correction's.
        points = np.array([0.0, max(2.0 * reference, 1.0)])
        verify = np.repeat(verify, 2, axis=1)
    least = 0.1 * verify
    verify = np.maximum(verify * factors[:, None] + slope * (points - reference), least)
    verify = np.stack([_non_decreasing(column) for column in verify.T], axis=1)
    return replace(table, kv_points=points, verify_ms=np.maximum.accumulate(verify, axis=1))


def _non_decreasing(values: Floats) -> Floats:
    """Nearest non-decreasing sequence in least squares (pool adjacent violators): noise is averaged, not maximised."""
    level: list[float] = []
    size: list[int] = []
    for value in values.tolist():
        level.append(value)
        size.append(1)
        while len(level) > 1 and level[-2] > level[-1]:
            total = size[-2] + size[-1]
            level[-2:] = [(level[-2] * size[-2] + level[-1] * size[-1]) / total]
            size[-2:] = [total]
    return np.repeat(level, size)
