"""Confidences in several ways, each from what was known before the step: the head's own, corrected ones, and those of
the estimator for drafters without a head.

What is fitted once (the static temperatures) is fitted on the steps before ``until``; everything else predicts a step,
then learns from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.policy.allocation import allocate
from sglang_adaptive.policy.calibration import Calibration
from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.policy.engine import Engine, PolicyConfig
from sglang_adaptive.policy.estimator import Estimator, features
from sglang_adaptive.policy.history import AcceptanceHistory
from sglang_adaptive.policy.logistic import LogisticFilter, logit, sigmoid
from sglang_adaptive.runtime.trace import Trace

# The engine sees the confidences of two steps before (``relay.OVERLAP_LAG``).
_LAG = 2
_NEWTON_STEPS = 12


@dataclass(frozen=True)
class Steps:
    """The drafted steps of a trace, in order. Per step: raw confidences [R, K]; drafts verified and accepted [R]; slots
    and generations [R]; temperatures [R]; maxima, entropies and margins of the draft distributions [R, K] (NaN where
    not recorded); tokens in the KV cache."""

    gamma: int
    raw: list[np.ndarray]
    verified: list[np.ndarray]
    accepted: list[np.ndarray]
    slots: list[np.ndarray]
    generations: list[np.ndarray]
    temperature: list[np.ndarray]
    maxima: list[np.ndarray]
    entropy: list[np.ndarray]
    margin: list[np.ndarray]
    kv_tokens: list[float]

    @staticmethod
    def of(trace: Trace) -> Steps:
        """Raises AdaptiveError for a trace without drafts."""
        parts = []
        for step, begin, end in zip(trace.steps, trace.start[:-1], trace.start[1:], strict=True):
            rows, raw = trace.rows[begin:end], trace.confidence[begin:end]
            if end > begin and np.isfinite(raw).any():
                numbers = (rows[name].astype(np.int64) for name in ("verified", "accepted", "slot", "generation"))
                drafts = (table[begin:end] for table in (trace.max_probability, trace.entropy, trace.margin))
                temperature = rows["temperature"].astype(float)
                parts.append((raw.astype(float), *numbers, temperature, *drafts, float(step["kv_tokens"])))
        if not parts:
            raise AdaptiveError("The trace has no step that drafted; record one under a load at which drafting pays.")
        return Steps(trace.gamma, *map(list, zip(*parts, strict=True)))

    @property
    def has_features(self) -> bool:
        return bool(np.isfinite(self.maxima[0]).any() and np.isfinite(self.entropy[0]).any())

    def __len__(self) -> int:
        return len(self.raw)

    def decided(self) -> list[np.ndarray]:
        """[R, K] bool per step: the drafts whose fate is known."""
        position = np.arange(self.gamma)
        return [
            (position <= accepted[:, None]) & (position < verified[:, None])
            for verified, accepted in zip(self.verified, self.accepted, strict=True)
        ]

    def only(self, sampled: bool) -> Steps:
        """The sampled requests alone, or the greedy ones; steps without any are left out."""
        rows = [(each > 0) == sampled for each in self.temperature]
        kept = [n for n, mask in enumerate(rows) if mask.any()]
        if not kept:
            raise AdaptiveError(f"The trace has no {'sampled' if sampled else 'greedy'} requests: leave out --only.")
        columns = (getattr(self, field.name) for field in fields(self)[1:-1])
        parts = ([column[n][rows[n]] for n in kept] for column in columns)
        return Steps(self.gamma, *parts, [self.kv_tokens[n] for n in kept])

    def beside(self, other: Steps) -> Steps:
        """One batch of both at every step, as long as both go on."""
        count = min(len(self), len(other))
        slots = 1 + int(max(each.max() for each in self.slots))
        other = replace(other, slots=[each + slots for each in other.slots])
        columns = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self)[1:-1])
        parts = ([np.concatenate(pair) for pair in zip(*both, strict=False)] for both in columns)
        return Steps(self.gamma, *parts, [a + b for a, b in zip(self.kv_tokens[:count], other.kv_tokens, strict=False)])

    def history(self) -> AcceptanceHistory:
        return AcceptanceHistory(int(max(slots.max() for slots in self.slots)) + 1)


def raw_head(steps: Steps, until: int) -> list[np.ndarray]:
    return steps.raw


def static_temperature(steps: Steps, until: int) -> list[np.ndarray]:
    """One temperature per position, the best of a grid by log loss."""
    grid = np.exp(np.linspace(np.log(0.2), np.log(5.0), 65))
    first = slice(max(until, 1))
    odds, known = np.concatenate([logit(raw) for raw in steps.raw[first]]), np.concatenate(steps.decided()[first])
    passed = np.concatenate([np.arange(steps.gamma) < accepted[:, None] for accepted in steps.accepted[first]])
    temperatures = np.ones(steps.gamma)
    for j in range(steps.gamma):
        mine = known[:, j] & np.isfinite(odds[:, j])
        if mine.any():
            scaled = odds[mine, j] / grid[:, None]
            losses = np.logaddexp(0.0, scaled).mean(axis=1) - (scaled * passed[mine, j]).mean(axis=1)
            temperatures[j] = grid[int(np.argmin(losses))]
    return [sigmoid(logit(raw) / temperatures) for raw in steps.raw]


def hindsight(steps: Steps, until: int) -> list[np.ndarray]:
    """The same kind of map as ``online``, per position the one of greatest likelihood on the steps from ``until`` on:
    it is judged on what it was fitted to, and so bounds what any such map can show there."""
    rest = slice(until, None)
    odds, known = np.concatenate([logit(raw) for raw in steps.raw[rest]]), np.concatenate(steps.decided()[rest])
    passed = np.concatenate([np.arange(steps.gamma) < accepted[:, None] for accepted in steps.accepted[rest]])
    best = np.tile([0.0, 1.0], (steps.gamma, 1))
    for j in range(steps.gamma):
        mine = known[:, j] & np.isfinite(odds[:, j])
        x, y = np.stack([np.ones(mine.sum()), odds[mine, j]], axis=1), passed[mine, j]
        for _ in range(_NEWTON_STEPS if y.size > 1 else 0):
            p = sigmoid(x @ best[j])
            best[j] += np.linalg.solve((x.T * (p * (1.0 - p))) @ x + 1e-3 * np.eye(2), x.T @ (y - p))
    return [sigmoid(best[:, 0] + best[:, 1] * logit(raw)) for raw in steps.raw]


def position_means(steps: Steps, until: int) -> list[np.ndarray]:
    """The running acceptance rate of each position (one of two at first)."""
    passed, seen, result = np.full(steps.gamma, 1.0), np.full(steps.gamma, 2.0), []
    for raw, accepted, known in zip(steps.raw, steps.accepted, steps.decided(), strict=True):
        result.append(np.tile(passed / seen, (len(raw), 1)))
        passed += (known & (np.arange(steps.gamma) < accepted[:, None])).sum(axis=0)
        seen += known.sum(axis=0)
    return result


def online_calibration(steps: Steps, until: int) -> list[np.ndarray]:
    """The engine's ``Calibration``."""
    calibration, result = Calibration(steps.gamma), []
    for raw, verified, accepted in zip(steps.raw, steps.verified, steps.accepted, strict=True):
        result.append(calibration.apply(raw))
        calibration.observe(raw, verified, accepted)
    return result


def online_with_recent(steps: Steps, until: int) -> list[np.ndarray]:
    """The same regression, with the request's recent acceptance (``AcceptanceHistory``) as one more feature."""
    learner = LogisticFilter(steps.gamma, np.array([0.0, 1.0, 0.0]), np.array([8.0, 16.0, 8.0]))

    def predict(seen: np.ndarray) -> np.ndarray:
        return sigmoid(np.einsum("rkd,kd->rk", seen, learner.weights))

    def look(n: int, recent: np.ndarray) -> np.ndarray:
        odds = logit(steps.raw[n])
        return np.stack([np.ones_like(odds), odds, np.broadcast_to(recent[:, None], odds.shape)], axis=2)

    return _with_history(steps, look, predict, learner.observe)


def drafter_maximum(steps: Steps, until: int) -> list[np.ndarray]:
    """The drafter's own maximum, believed as it is."""
    return [maxima.astype(float) for maxima in steps.maxima]


def headless(steps: Steps, until: int) -> list[np.ndarray]:
    """The engine's ``Estimator`` for drafters without a head: nothing of the head is looked at."""
    return _estimated(steps, steps.temperature)


def headless_without_recent(steps: Steps, until: int) -> list[np.ndarray]:
    """The same without the request's recent acceptance."""
    return _estimated(steps, steps.temperature, use_recent=False)


def headless_without_temperature(steps: Steps, until: int) -> list[np.ndarray]:
    """The same, taking every request for a greedy one."""
    return _estimated(steps, [np.zeros_like(each) for each in steps.temperature])


def head_and_distribution(steps: Steps, until: int) -> list[np.ndarray]:
    """The estimator's features and the head's log-odds in one regression, as the option ``draft_features`` serves."""
    prior = np.zeros(_seen(steps, 0, np.zeros(len(steps.raw[0])), steps.temperature).shape[2] + 1)
    prior[-1] = 1.0
    learner = LogisticFilter(steps.gamma, prior, np.full(prior.size, 8.0))

    def look(n: int, recent: np.ndarray) -> np.ndarray:
        return np.concatenate([_seen(steps, n, recent, steps.temperature), logit(steps.raw[n])[..., None]], axis=2)

    def predict(seen: np.ndarray) -> np.ndarray:
        return sigmoid(np.einsum("rkd,kd->rk", seen, learner.weights))

    return _with_history(steps, look, predict, learner.observe)


METHODS: dict[str, Callable[[Steps, int], list[np.ndarray]]] = {
    "raw head": raw_head,
    "static temperature": static_temperature,
    "map in hindsight": hindsight,
    "position means": position_means,
    "online": online_calibration,
    "online + recent": online_with_recent,
    "drafter's maximum": drafter_maximum,
    "headless, no temperature": headless_without_temperature,
    "headless, no recent": headless_without_recent,
    "headless": headless,
    "head + distribution": head_and_distribution,
}
NEED_FEATURES = tuple(METHODS)[6:]


def trimmed(steps: Steps, cost: CostModel) -> Steps:
    """The same steps as the engine would have verified them under ``cost``: later drafts of a request are not known.

    The requests go on as recorded; only what a learner sees becomes less.
    """
    engine = Engine(PolicyConfig(correct_costs=False, skip_draft=False), cost, steps.gamma)
    known, last = np.ones((int(max(slots.max() for slots in steps.slots)) + 1, steps.gamma)), {}
    verified, accepted = [], []
    for n, raw in enumerate(steps.raw):
        if n >= _LAG:
            known[steps.slots[n - _LAG]] = steps.raw[n - _LAG]
            last.update(zip(steps.slots[n - _LAG].tolist(), steps.generations[n - _LAG].tolist(), strict=True))
        slots, requests = steps.slots[n], len(raw)
        fresh = np.array([last.get(slot) == mine for slot, mine in zip(slots, steps.generations[n], strict=True)])
        size = {"requests": requests, "non_draft_tokens": requests, "kv_tokens": steps.kv_tokens[n]}
        budget = engine.size(known[slots], fresh=fresh, **size).budget
        map_now = torch.from_numpy(engine.calibration.coefficients.astype(np.float32))
        lengths = allocate(torch.from_numpy(raw.astype(np.float32)), budget, calibration=map_now).numpy() - 1
        verified.append(np.minimum(lengths, steps.verified[n]))
        accepted.append(np.minimum(steps.accepted[n], verified[n]))
        engine.observe(
            **size,
            draft_tokens=int(verified[n].sum()),
            committed_tokens=int(accepted[n].sum()) + requests,
            confidence=raw,
            verified=verified[n],
            accepted=accepted[n],
        )
    return replace(steps, verified=verified, accepted=accepted)


def _seen(steps: Steps, n: int, recent: np.ndarray, temperature: list[np.ndarray]) -> np.ndarray:
    return features(steps.maxima[n], steps.entropy[n], recent, temperature[n])


def _estimated(steps: Steps, temperature: list[np.ndarray], use_recent: bool = True) -> list[np.ndarray]:
    estimator = Estimator(steps.gamma)

    def look(n: int, recent: np.ndarray) -> np.ndarray:
        return _seen(steps, n, recent if use_recent else np.zeros_like(recent), temperature)

    return _with_history(steps, look, estimator.confidence, estimator.observe)


def _with_history(
    steps: Steps,
    look: Callable[[int, np.ndarray], np.ndarray],
    predict: Callable[[np.ndarray], np.ndarray],
    learn: Callable[[np.ndarray, np.ndarray, np.ndarray], None],
) -> list[np.ndarray]:
    history, result = steps.history(), []
    for n in range(len(steps)):
        owners = steps.slots[n], steps.generations[n]
        seen = look(n, history.relative(*owners))
        result.append(predict(seen))
        learn(seen, steps.verified[n], steps.accepted[n])
        history.observe(*owners, steps.verified[n], steps.accepted[n])
    return result
