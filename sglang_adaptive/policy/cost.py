"""What a decode step costs, in ms, as a function of how many tokens it verifies.

Source of the form: step(B) = draft(R) + verify(tier(T + B), kv) + sampling(R + B) + overhead, with R requests, T tokens
that are no drafts (one anchor per request and mixed prefill tokens) and B draft tokens.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_adaptive.policy.robust import robust_median

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Point = TypeVar("Point")

MAX_TOKENS = 1 << 20
# Cost is all but linear in context: a few points say it, and each makes every scan's table larger.
_MAX_KV_POINTS = 16
_FLAT_RATIO = 1.0 + 1e-9


class VerifySample(NamedTuple):
    """One timed verify pass: ``tokens`` in it (its graph tier), ``kv_tokens`` cached over all requests, ``ms``."""

    tokens: int
    kv_tokens: float
    ms: float


class _Context(NamedTuple):
    """A context's KV segment and the place in it, and the costs that were asked for there."""

    left: int
    share: float
    points: dict[tuple[int, int, int, bool], float]


class CostTableError(ValueError):
    """A cost table that must not be used; the message is one sentence."""


@dataclass(frozen=True, eq=False)
class CostModel:
    """The cost table. All arrays are sorted by their points and read only by convention.

    ``tiers`` [n] tokens; ``kv_points`` [m] tokens; ``verify_ms`` [n, m], non-decreasing along both axes;
    ``draft_points`` [d] requests with ``draft_ms`` [d]; ``sampling_points`` [s] logit rows with ``sampling_ms`` [s];
    ``overhead_ms`` host time per step that overlap does not hide; ``capture_limit`` the largest captured graph in
    tokens, or None when nothing is captured; ``narrow_draft_ms`` the same as ``draft_ms`` [d] for drafts of fewer than
    K tokens a request, by their number.
    """

    tiers: Ints
    kv_points: Floats
    verify_ms: Floats
    draft_points: Ints
    draft_ms: Floats
    sampling_points: Ints
    sampling_ms: Floats
    overhead_ms: float = 0.0
    capture_limit: int | None = None
    narrow_draft_ms: Mapping[int, Floats] = field(default_factory=dict)
    _dense: dict[str, Floats] = field(default_factory=dict, init=False, repr=False)
    _contexts: dict[float, _Context] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def empty(overhead_ms: float = 0.0) -> CostModel:
        """The model of a server without a profile: it knows nothing, so everything is verified."""
        none_i, none_f = np.zeros(0, np.int64), np.zeros(0)
        return CostModel(none_i, np.zeros(1), np.zeros((0, 1)), none_i, none_f, none_i, none_f, overhead_ms)

    @staticmethod
    def from_samples(
        verify: Sequence[VerifySample],
        draft: Sequence[tuple[int, float]] = (),
        sampling: Sequence[tuple[int, float]] = (),
        overhead_ms: float = 0.0,
        capture_limit: int | None = None,
        narrow_draft: Mapping[int, Sequence[tuple[int, float]]] | None = None,
    ) -> CostModel:
        """Build the table from raw timings.

        Each point is the median of its samples after outliers are dropped; samples that are not finite, or negative,
        are ignored. A bigger batch contains the smaller one and noise only makes timings longer, so no point costs more
        than any larger one was measured to: the minimum is taken from the largest down, over tokens and KV length, over
        requests, and over rows. A slow sample thus lifts no other point above what that one was measured to, and its
        own not above the next larger one.
        """
        cells = _medians(((int(s.tokens), float(s.kv_tokens)), float(s.ms)) for s in verify if s.tokens > 0)
        if not cells:
            return CostModel.empty(overhead_ms)
        draft_points, draft_ms = _table((int(n), float(ms)) for n, ms in draft)
        sampling_points, sampling_ms = _table((int(n), float(ms)) for n, ms in sampling)
        narrow_ms = {}
        for width, timed in (narrow_draft or {}).items():
            points, ms = _table((int(n), float(ms)) for n, ms in timed)
            if points.size:
                # Fewer tokens never take longer.
                narrow_ms[width] = np.minimum(np.interp(draft_points, points, ms), draft_ms)
        tiers = np.array(sorted({tokens for tokens, _ in cells}), np.int64)
        kv_points = _thinned(np.array(sorted({kv for _, kv in cells})))
        return CostModel(
            tiers,
            kv_points,
            _least_of_larger(_fill(cells, tiers, kv_points)),
            draft_points,
            draft_ms,
            sampling_points,
            sampling_ms,
            float(overhead_ms),
            capture_limit,
            narrow_ms,
        )

    @cached_property
    def is_informative(self) -> bool:
        """False when the table cannot favour one budget over another: no table, one tier only, or a flat one."""
        return self.tiers.size > 1 and bool((self.verify_ms[-1] > self.verify_ms[0] * _FLAT_RATIO).any())

    def step_ms(
        self, requests: int, non_draft_tokens: int, budgets: NDArray[np.integer], kv_tokens: float, draft: bool = True
    ) -> Floats:
        """Cost in ms of a step for each of ``budgets`` [b] (draft tokens); ``kv_tokens`` counts the whole batch.

        ``draft`` False leaves the drafter's cost out, for a step that does not draft. Returns float64 [b].
        """
        if not budgets.size:
            return np.zeros(0)
        low, high = int(budgets.min()), int(budgets.max())
        every = self.scan_ms(requests, non_draft_tokens + low, requests + low, high - low + 1, kv_tokens, draft)
        return np.asarray(every[budgets - low])

    def scan_ms(
        self, requests: int, first_token: int, first_row: int, count: int, kv_tokens: float, draft: bool = True
    ) -> Floats:
        """As ``step_ms`` for ``count`` consecutive budgets, of which the first verifies ``first_token`` tokens in all
        and samples ``first_row`` rows. Costs are sliced from tables by token count, which keeps the scan cheap."""
        total = self._verify_at(kv_tokens, first_token, first_token + count)
        if self.sampling_points.size:
            total += self._dense_table("sampling", first_row + count)[first_row : first_row + count]
        total += self.overhead_ms + (self.draft_cost(requests) if draft else 0.0)
        return total

    def point_ms(self, requests: int, tokens: int, rows: int, kv_tokens: float, draft: bool = True) -> float:
        """Cost in ms of one step that verifies ``tokens`` in all and samples ``rows`` rows."""
        # A step asks several times for one and the same point.
        context = self._contexts.get(kv_tokens) or self._enter(kv_tokens)
        point = requests, tokens, rows, draft
        total = context.points.get(point)
        if total is None:
            total = self._verify_point(tokens, context) + self.overhead_ms
            if self.sampling_points.size:
                total += self._dense_table("sampling", rows + 1).item(rows)
            if draft:
                total += self.draft_cost(requests)
            context.points[point] = total
        return total

    def verify_cost(self, tokens: int, kv_tokens: float) -> float:
        """Cost in ms of the verify pass alone."""
        return self._verify_point(tokens, self._contexts.get(kv_tokens) or self._enter(kv_tokens))

    def _verify_point(self, tokens: int, context: _Context) -> float:
        if not self.tiers.size:
            return 0.0
        dense, left, share = self._dense_table("verify", tokens + 1), context.left, context.share
        low: float = dense.item(left, tokens)
        return low if share == 0.0 else low + share * (dense.item(left + 1, tokens) - low)

    def prepare(self, tokens: int) -> None:
        """Expand the tables up to ``tokens`` now, so that no later step pays for it."""
        self.scan_ms(0, tokens, tokens, 1, float(self.kv_points[-1]))

    def draft_cost(self, requests: int) -> float:
        """Drafter cost in ms for ``requests`` requests; 0 when it was not profiled."""
        return float(self._dense_table("draft", requests + 1).item(requests)) if self.draft_points.size else 0.0

    def drafting(self, width: int) -> CostModel:
        """The same costs where every request drafts ``width`` tokens, one of ``narrow_draft_ms``; 0 is K."""
        if not width:
            return self
        narrow = replace(self, draft_ms=self.narrow_draft_ms[width], narrow_draft_ms={})
        # What does not depend on the draft is the same arrays.
        narrow._dense.update({name: table for name, table in self._dense.items() if name != "draft"})
        return narrow

    def tier(self, tokens: int) -> int:
        """Size in tokens of the graph that ``tokens`` are padded to; ``tokens`` itself where none is captured."""
        captured = self._captured()
        if captured and tokens <= self.tiers[captured - 1]:
            return int(self.tiers[int(np.searchsorted(self.tiers[:captured], tokens))])
        return tokens

    def save(self, path: str | os.PathLike[str], key: Mapping[str, str]) -> None:
        """Write the table as JSON, atomically. ``key`` says what it was measured on. Raises ``OSError``."""
        from sglang_adaptive.policy import cost_file

        cost_file.save(self, path, key)

    @staticmethod
    def load(path: str | os.PathLike[str], key: Mapping[str, str]) -> CostModel:
        """Read and check a table that ``save`` wrote for the same ``key``. Raises ``CostTableError``, ``OSError``."""
        from sglang_adaptive.policy import cost_file

        return cost_file.load(path, key)

    def _captured(self) -> int:
        return 0 if self.capture_limit is None else int(np.searchsorted(self.tiers, self.capture_limit, side="right"))

    @cached_property
    def _kv_list(self) -> list[float]:
        # One item of an array at a time is several times slower.
        return list(self.kv_points.tolist())

    def _enter(self, kv_tokens: float) -> _Context:
        """Make ``kv_tokens`` the only context that is kept; beyond the last segment its slope goes on."""
        points, left, share = self._kv_list, 0, 0.0
        if len(points) > 1 and kv_tokens > points[0]:
            left = min(bisect_right(points, kv_tokens) - 1, len(points) - 2)
            share = float((kv_tokens - points[left]) / (points[left + 1] - points[left]))
        self._contexts.clear()
        context = self._contexts[kv_tokens] = _Context(left, share, {})
        return context

    def _verify_at(self, kv_tokens: float, first: int, end: int) -> Floats:
        if not self.tiers.size:
            return np.zeros(end - first)
        left, share, _ = self._contexts.get(kv_tokens) or self._enter(kv_tokens)
        low = self._dense_table("verify", end)[left, first:end]
        if share == 0.0:
            return np.array(low)
        cost: Floats = self._dense_table("rise", end)[left, first:end] * share
        cost += low
        return cost

    def _dense_table(self, name: str, size: int) -> Floats:
        table = self._dense.get(name)
        if table is None or table.shape[-1] < size:
            table = self._dense[name] = self._expand(name, size)
        return table

    def _expand(self, name: str, size: int) -> Floats:
        if size > MAX_TOKENS:
            raise ValueError(f"a step of {size} tokens is beyond the {MAX_TOKENS} that a cost table covers")
        at = np.arange(max(1024, 1 << (size - 1).bit_length()))
        if name == "verify":
            return np.stack([self._expand_verify(at, column) for column in self.verify_ms.T])
        if name == "rise":
            return np.diff(self._dense_table("verify", size), axis=0)
        if name == "draft" and self.capture_limit is not None:
            return _above(at, self.draft_points, self.draft_ms, _stairs(at, self.draft_points, self.draft_ms))
        if name == "draft":
            return _line(at, self.draft_points, self.draft_ms)
        return _line(at, self.sampling_points, self.sampling_ms)

    def _expand_verify(self, at: Ints, ms: Floats) -> Floats:
        captured = self._captured()
        if not captured:
            return _line(at, self.tiers, ms)
        stairs_points, stairs_ms = self.tiers[:captured], ms[:captured]
        stairs = _stairs(at, stairs_points, stairs_ms)
        if captured == self.tiers.size:
            return _above(at, stairs_points, stairs_ms, stairs)
        # A count between the limit and the first uncaptured sample costs what that sample costs: no blending across.
        eager = _line(at, self.tiers[captured:], ms[captured:], fallback=_end_slope(stairs_points, stairs_ms))
        return np.where(at <= stairs_points[-1], stairs, eager)


def _stairs(at: Ints, points: Ints, ms: Floats) -> Floats:
    return np.asarray(ms[np.minimum(np.searchsorted(points, at), points.size - 1)])


def _above(at: Ints, points: Ints, ms: Floats, inside: Floats) -> Floats:
    return np.asarray(inside + _end_slope(points, ms) * np.maximum(at - points[-1], 0))


def _line(at: Ints, points: Ints, ms: Floats, fallback: float = 0.0) -> Floats:
    slope = _end_slope(points, ms) if points.size > 1 else fallback
    return np.asarray(np.interp(at, points, ms) + slope * np.maximum(at - points[-1], 0))


def _end_slope(points: Ints, ms: Floats) -> float:
    """Slope over the upper half of the points: one flat last step must not make all beyond it look free."""
    if points.size < 2:
        return 0.0
    middle = min(int(np.searchsorted(points, points[-1] / 2)), points.size - 2)
    return float((ms[-1] - ms[middle]) / (points[-1] - points[middle]))


def _medians(samples: Iterable[tuple[Point, float]]) -> dict[Point, float]:
    groups: dict[Point, list[float]] = {}
    for point, ms in samples:
        if np.isfinite(ms) and ms >= 0:
            groups.setdefault(point, []).append(ms)
    return {point: robust_median(np.array(values)) for point, values in groups.items()}


def _table(samples: Iterable[tuple[int, float]]) -> tuple[Ints, Floats]:
    cells = _medians(samples)
    points = sorted(cells)
    return np.array(points, np.int64), _least_of_larger(np.array([cells[point] for point in points]))


def _fill(cells: Mapping[tuple[int, float], float], tiers: Ints, kv_points: Floats) -> Floats:
    """A full grid from cells that may be missing: inside a tier by interpolation, outside by the median KV slope."""
    rows = []
    for tier in tiers.tolist():
        known = sorted((kv, ms) for (tokens, kv), ms in cells.items() if tokens == tier)
        rows.append((np.array([kv for kv, _ in known]), np.array([ms for _, ms in known])))
    slopes = [max(0.0, (ms[-1] - ms[0]) / (kv[-1] - kv[0])) for kv, ms in rows if kv.size > 1]
    slope = float(np.median(slopes)) if slopes else 0.0
    grid = [
        np.interp(kv_points, kv, ms) + slope * (np.maximum(kv_points - kv[-1], 0) - np.maximum(kv[0] - kv_points, 0))
        for kv, ms in rows
    ]
    return np.asarray(np.maximum(np.stack(grid), 0.0))


def _thinned(points: Floats) -> Floats:
    if points.size <= _MAX_KV_POINTS:
        return points
    return np.asarray(points[np.linspace(0, points.size - 1, _MAX_KV_POINTS).round().astype(np.int64)])


def _least_of_larger(ms: Floats) -> Floats:
    """The least of each value and all at places that are as large or larger along every axis: non-decreasing."""
    for axis in range(ms.ndim):
        ms = np.flip(np.minimum.accumulate(np.flip(ms, axis), axis=axis), axis)
    return np.ascontiguousarray(ms)
