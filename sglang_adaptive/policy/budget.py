"""How many draft tokens one step verifies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_adaptive.policy.cost import CostModel

Floats = NDArray[np.float64]

NO_TABLE = "no cost table: verify everything"
NOTHING_TO_SIZE = "no draft tokens"
SMALL_GAIN = "verify everything: no trim gains enough"
ALL_WORTH = "verify everything: every token is worth its cost"
LOW_LOAD = "verify everything: even worthless drafts cost less than the minimum gain"
TRIMMED = "trimmed"


@dataclass(frozen=True, init=False)
class Decision:
    """What one step does.

    ``budget`` draft tokens are verified over the batch. ``draft`` False: the step runs without a drafter (budget 0).
    ``uniform``: every request verifies all that is drafted for it, so no allocation is needed. ``expected_tokens`` is
    the expected output of the step and ``predicted_ms`` its cost; both are 0 where nothing was predicted. ``gain`` is
    the predicted relative gain in tokens per ms over verifying everything. ``width`` tokens are drafted for each
    request; 0 is K.
    """

    budget: int
    draft: bool
    uniform: bool
    expected_tokens: float
    predicted_ms: float
    reason: str
    gain: float = 0.0
    width: int = 0

    def __init__(
        self,
        budget: int,
        draft: bool,
        uniform: bool,
        expected_tokens: float,
        predicted_ms: float,
        reason: str,
        gain: float = 0.0,
        width: int = 0,
    ) -> None:
        # All fields at once: the generated one of a frozen class takes a call for each.
        self.__dict__.update(
            budget=budget,
            draft=draft,
            uniform=uniform,
            expected_tokens=expected_tokens,
            predicted_ms=predicted_ms,
            reason=reason,
            gain=gain,
            width=width,
        )

    def for_requests(self, requests: int, gamma: int) -> Decision:
        """The same for R requests, of a decision that drafts for none or verifies all of every request's drafts
        (``gamma`` is K); of another one, which must be for R requests, itself."""
        return self.with_budget(requests * (self.width or gamma) if self.uniform else self.budget)

    def with_budget(self, budget: int) -> Decision:
        """The same with another budget, for which nothing is predicted."""
        if budget == self.budget:
            return self
        return Decision(budget, self.draft, self.uniform, 0.0, 0.0, self.reason, self.gain, self.width)

    def of_width(self, width: int, uniform: bool) -> Decision:
        """The same where every request drafts ``width`` tokens, and verifies all of them if ``uniform``."""
        return Decision(
            self.budget,
            self.draft,
            uniform,
            self.expected_tokens,
            self.predicted_ms,
            self.reason,
            self.gain,
            width,
        )

    def at_cost(self, predicted_ms: float) -> Decision:
        """The same at another predicted cost; ``dataclasses.replace`` takes three times as long."""
        return Decision(
            self.budget,
            self.draft,
            self.uniform,
            self.expected_tokens,
            predicted_ms,
            self.reason,
            self.gain,
            self.width,
        )


def size_budget(
    survival: Floats,
    cost: CostModel,
    non_draft_tokens: int,
    kv_tokens: float,
    *,
    rate_tokens_per_ms: float | None = None,
    weights: Floats | None = None,
    min_gain: float = 0.0,
    min_len: int = 1,
    max_len: int | None = None,
    trim_ms: float = 0.0,
    previous: Decision | None = None,
) -> Decision:
    """Choose the budget by a scan over every B; it is global because the cost staircase makes the curve non-unimodal.

    ``survival`` [R, K], non-increasing along K, in [0, 1]; requests without history carry ones. ``non_draft_tokens``
    are the anchors and mixed prefill tokens of the step, ``kv_tokens`` the cached tokens over the batch. The scan
    maximises E(B) / C(B) in tokens per ms, or E(B) - rate * C(B) when ``rate_tokens_per_ms`` (the long-run rate of
    renewal-reward theory) is given. E(B) = R + the B largest survivals, C(B) as in ``cost``.

    ``weights`` [R] > 0 multiply each request's tokens in the objective. ``min_len`` and ``max_len`` bound the verify
    length (1 + drafts) of each request as the allocation does. ``trim_ms`` is the fixed price of a step that is not
    uniform. Among equal budgets the largest wins: tokens up to the edge of a tier are free. A trim must gain more than
    ``min_gain`` over verifying everything, or half of it when the ``previous`` step was trimmed, so that it does not
    flap.
    """
    requests, width = survival.shape
    most = min(width, width if max_len is None else max_len - 1)
    least = min(most, min_len - 1)
    if requests == 0 or most <= 0:
        return Decision(0, True, width == 0 or requests == 0, float(requests), 0.0, NOTHING_TO_SIZE)
    if not cost.is_informative:
        return verify_all(survival, cost, non_draft_tokens, kv_tokens, NO_TABLE, max_len)
    forced, largest = requests * least, requests * most

    gained, expected = _expected(survival, least, most, weights)
    ms = cost.scan_ms(requests, non_draft_tokens + forced, requests + forced, largest - forced + 1, kv_tokens)
    if trim_ms:
        ms[:-1] += trim_ms
    if rate_tokens_per_ms is None:
        value = gained / ms
        scale = value.item(-1)
    else:
        value = gained - rate_tokens_per_ms * ms
        scale = rate_tokens_per_ms * ms.item(-1)
    best = value.size - 1 - int(value[::-1].argmax())
    gain = (value.item(best) - value.item(-1)) / scale if scale > 0 else 0.0

    threshold = needed_gain(min_gain, previous)
    reason = TRIMMED
    if best == value.size - 1:
        reason, gain = ALL_WORTH, 0.0
    elif gain <= threshold:
        reason, gain, best = SMALL_GAIN, 0.0, value.size - 1
    budget = forced + best
    return Decision(budget, True, budget == requests * width, expected.item(best), ms.item(best), reason, gain)


def needed_gain(min_gain: float, previous: Decision | None) -> float:
    """The gain a trim must exceed: half of ``min_gain`` after a step that was trimmed."""
    return min_gain / 2 if previous is not None and previous.reason == TRIMMED else min_gain


def verify_all(
    survival: Floats,
    cost: CostModel,
    non_draft_tokens: int,
    kv_tokens: float,
    reason: str,
    max_len: int | None = None,
) -> Decision:
    """The decision to verify every draft that ``max_len`` allows. Arguments as in ``size_budget``."""
    requests, width = survival.shape
    most = min(width, width if max_len is None else max_len - 1)
    budget = requests * most
    expected = float(requests + np.add.reduce(survival[:, :most], axis=None))
    ms = 0.0
    if cost.tiers.size:
        ms = cost.point_ms(requests, non_draft_tokens + budget, requests + budget, kv_tokens)
    return Decision(budget, True, budget == requests * width, expected, ms, reason)


def no_trim_can_gain(
    cost: CostModel, requests: int, largest: int, non_draft_tokens: int, kv_tokens: float, gain: float
) -> bool:
    """True when trimming ``largest`` drafts to none would not gain ``gain`` even if every draft were worthless.

    No budget expects more tokens than verifying everything does, so in either form of the objective the gain of a
    trim is at most C(largest) / C(0) - 1. This needs no confidences: it is what makes low load cheap.
    """
    if not cost.is_informative:
        return False
    all_ms = cost.point_ms(requests, non_draft_tokens + largest, requests + largest, kv_tokens)
    none_ms = cost.point_ms(requests, non_draft_tokens, requests, kv_tokens)
    return all_ms <= none_ms * (1.0 + gain)


def _expected(survival: Floats, least: int, most: int, weights: Floats | None) -> tuple[Floats, Floats]:
    """E(B) for every B the scan may choose, weighted and plain (the same array without weights)."""
    requests = survival.shape[0]
    open_tokens = survival[:, least:most]
    base = requests + (float(survival[:, :least].sum()) if least else 0.0)
    if weights is None:
        rising = np.empty(open_tokens.size + 1)
        # Survivals lie position by position: in that order the copy is fastest, and a sort does not mind.
        rising[:-1] = open_tokens.T.ravel()
        rising[:-1].sort()
        rising[-1] = base
        total = np.add.accumulate(rising[::-1])
        return total, total
    # Mean weight 1 keeps the objective in tokens, so that the rate and the gain keep their meaning.
    share = np.asarray(weights, np.float64) / np.mean(weights)
    weighted = open_tokens * share[:, None]
    order = np.argsort(-weighted, axis=None, kind="stable")
    weighted_base = requests + (float((survival[:, :least] * share[:, None]).sum()) if least else 0.0)
    return _running(weighted_base, weighted.ravel()[order]), _running(base, open_tokens.ravel()[order])


def _running(base: float, falling: Floats) -> Floats:
    total = np.empty(falling.size + 1)
    total[0] = base
    total[1:] = falling
    return np.cumsum(total, out=total)
