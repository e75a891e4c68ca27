"""The ways to choose verify lengths that a comparison sets against each other.

* ``none``: no drafter, one token per request and step.
* ``fixed-N``: N drafts of every request are verified, N = 1..K.
* ``stock``: argmax of E/C over all budgets with raw confidences and a table that was profiled offline at one context;
  straight lines between its points, no correction, no calibration, no minimum gain, no steps without a draft.
* ``ours``: the server's ``Engine``; ``ours:NAME=VALUE,...`` sets fields of its ``PolicyConfig``
  (``skip.NAME`` those of its ``SkipRules``).
* ``clairvoyant``: knows, for each request, which drafts of this step will be accepted, and picks the budget (or not to
  draft) that maximises the step's realised tokens per ms. It hands the budget out as everybody has to, by this step's
  confidences, those of an unbiased head.
* ``informed``: knows the true probability of each draft of this step, not its outcome, and picks the budget (or not to
  draft) that maximises expected tokens per ms: no head and no calibration can know more.
* ``informed-rate``: knows the same, and maximises expected tokens minus its own long-run rate times ms. That is the
  optimum of renewal-reward theory where all tokens are alike; requests go through easy and hard text in order, though.
* ``oracle``: as ``clairvoyant``, but it also hands the budget out knowing the outcomes, so that no draft is ever
  verified in vain. A bound only.

``stock`` and ``ours`` size with confidences two steps old and hand out by live ones. The last four see the present
step and the true costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from sglang_adaptive.benchmarks.simulator.view import Record, View
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.policy.engine import Decision, Engine, PolicyConfig
from sglang_adaptive.policy.saturation import SkipRules
from sglang_adaptive.policy.steady import Steady
from sglang_adaptive.policy.survival import survival


@dataclass(frozen=True)
class Plan:
    """``verify`` [R] drafts per request; ``draft`` False: the drafter does not run; ``ragged``: not uniform;
    ``observed`` False: the step repeats a decision, and nothing is learned from it; ``width`` tokens are drafted for
    each request, 0 is K."""

    verify: np.ndarray
    draft: bool = True
    ragged: bool = False
    observed: bool = True
    width: int = 0


class Arm:
    """One policy on one engine. ``learns``: it wants ``learn`` called with every finished step, ``lag`` steps later."""

    learns = False

    def decide(self, view: View) -> Plan:
        raise NotImplementedError

    def learn(self, record: Record) -> None:
        """Take a finished step."""


class Fixed(Arm):
    def __init__(self, drafts: int, width: int = 0) -> None:
        self.drafts, self.width = drafts, width

    def decide(self, view: View) -> Plan:
        return Plan(np.full(view.requests, self.drafts), draft=self.drafts > 0, width=self.width)


class Stock(Arm):
    learns = True

    def __init__(self, table: CostModel, gamma: int) -> None:
        middle = table.kv_points.size // 2
        flat = replace(table, kv_points=np.zeros(1), verify_ms=table.verify_ms[:, middle : middle + 1])
        self.table = replace(flat, capture_limit=None)
        self.gamma = gamma

    def decide(self, view: View) -> Plan:
        stale, fresh = view.stale()
        alive = survival(stale)
        alive[~fresh] = 1.0
        falling = np.sort(alive, axis=None)[::-1]
        expected = view.requests + np.concatenate([[0.0], np.cumsum(falling)])
        budgets = np.arange(expected.size)
        ms = self.table.step_ms(view.requests, view.non_draft_tokens, budgets, 0.0)
        return _handed_out(int(np.argmax(expected / ms)), view.live())


class Ours(Arm):
    learns = True

    def __init__(self, table: CostModel, gamma: int, config: PolicyConfig) -> None:
        self.engine = Engine(config, table, gamma)
        self.steady = Steady()
        self.tiers = table.tiers.tolist() if table.capture_limit else []
        self.decision: Decision | None = None

    def decide(self, view: View) -> Plan:
        # As the server's planner does. With mixed prefill every step is sized.
        again = view.requests == view.non_draft_tokens and self.decision and self.steady.repeats(view.requests)
        if again:
            most = self.decision.width or self.engine.gamma
            decision = self.steady.again(self.decision, view.requests, self.engine.gamma, self.tiers, most=most)
        else:
            self.decision = decision = self._sized(view)
            self.steady.sized(decision, view.requests)
        if not decision.draft:
            return Plan(np.zeros(view.requests, np.int64), draft=False, observed=not again)
        width, drafts = decision.width, decision.width or self.engine.gamma
        if decision.uniform:
            return Plan(np.full(view.requests, drafts), observed=not again, width=width)
        live = view.live()
        calibrated = self.engine.calibration.apply(live) if self.engine.config.calibrate else live
        handed_out = _handed_out(decision.budget, calibrated[:, :drafts])
        # Packed even where nothing is cut off: so the policy has decided.
        return replace(handed_out, ragged=True, observed=not again, width=width)

    def _sized(self, view: View) -> Decision:
        stale, fresh = view.stale()
        return self.engine.size(
            stale,
            requests=view.requests,
            non_draft_tokens=view.non_draft_tokens,
            kv_tokens=view.kv_tokens,
            fresh=fresh,
            repeated=self.steady.repeated,
        )

    def learn(self, record: Record) -> None:
        self.engine.observe(
            requests=record.requests,
            non_draft_tokens=record.non_draft_tokens,
            draft_tokens=int(record.verified.sum()),
            kv_tokens=record.kv_tokens,
            committed_tokens=record.requests + int(record.accepted.sum()),
            step_ms=record.step_ms,
            drafted=record.confidence is not None,
            width=record.width,
            confidence=record.confidence,
            verified=record.verified,
            accepted=record.accepted,
        )


class Clairvoyant(Arm):
    def __init__(self, table: CostModel, trim_ms: float) -> None:
        self.table, self.trim_ms = table, trim_ms

    def decide(self, view: View) -> Plan:
        shares = survival(view.clean())
        useful = np.arange(shares.shape[1])[:, None] < view.run
        return self._in_order(view, shares, useful)

    def _in_order(self, view: View, shares: np.ndarray, worth: np.ndarray) -> Plan:
        """The best budget when drafts go in the order of ``shares`` [R, K] and each yields its ``worth`` [K, R]."""
        order = np.argsort(-shares.T.ravel(), kind="stable")
        budget = self._best(view, np.cumsum(worth.ravel()[order]))
        if budget is None:
            return Plan(np.zeros(view.requests, np.int64), draft=False)
        ahead = np.zeros(order.size, bool)
        ahead[order[:budget]] = True
        verify = ahead.reshape(shares.shape[1], -1).sum(axis=0)
        return Plan(verify, ragged=budget < shares.size)

    def _best(self, view: View, gained: np.ndarray) -> int | None:
        ms = self.table.scan_ms(
            view.requests, view.non_draft_tokens, view.requests, gained.size + 1, view.kv_tokens, draft=True
        )
        ms[: view.requests * view.gamma] += self.trim_ms
        plain = self.table.point_ms(view.requests, view.non_draft_tokens, view.requests, view.kv_tokens, draft=False)
        return self._choose(view.requests + np.concatenate([[0], gained]), ms, view.requests, plain)

    def _choose(self, expected: np.ndarray, ms: np.ndarray, plain_tokens: int, plain_ms: float) -> int | None:
        rate = expected / ms
        best = int(np.argmax(rate))
        return best if rate[best] > plain_tokens / plain_ms else None


class Informed(Clairvoyant):
    def decide(self, view: View) -> Plan:
        shares = survival(view.truth())
        return self._in_order(view, shares, shares.T)


class InformedRate(Informed):
    def __init__(self, table: CostModel, trim_ms: float) -> None:
        super().__init__(table, trim_ms)
        self.tokens = self.ms = 0.0

    def _choose(self, expected: np.ndarray, ms: np.ndarray, plain_tokens: int, plain_ms: float) -> int | None:
        rate = self.tokens / self.ms if self.ms else float(np.max(expected / ms))
        value = expected - rate * ms
        best = int(np.argmax(value))
        draft = value[best] > plain_tokens - rate * plain_ms
        self.tokens += expected[best] if draft else plain_tokens
        self.ms += ms[best] if draft else plain_ms
        return best if draft else None


class Oracle(Clairvoyant):
    def decide(self, view: View) -> Plan:
        budget = self._best(view, np.arange(1, int(view.run.sum()) + 1))
        if budget is None:
            return Plan(np.zeros(view.requests, np.int64), draft=False)
        whole = np.cumsum(view.run)
        verify = np.clip(budget - (whole - view.run), 0, view.run)
        return Plan(verify, ragged=True)


def top_budget(alive: np.ndarray, budget: int) -> np.ndarray:
    """[R] drafts per request: ``allocation.allocate`` on survivals [R, K] that are already known, in numpy."""
    keys = alive.T.ravel()
    if budget >= keys.size:
        return np.full(alive.shape[0], alive.shape[1])
    if budget <= 0:
        return np.zeros(alive.shape[0], np.int64)
    threshold = np.partition(keys, keys.size - budget)[keys.size - budget]
    ahead = keys > threshold
    ahead[np.flatnonzero(keys == threshold)[: budget - np.count_nonzero(ahead)]] = True
    return np.asarray(ahead.reshape(alive.shape[1], -1).sum(axis=0))


def _handed_out(budget: int, confidence: np.ndarray) -> Plan:
    return Plan(top_budget(survival(confidence), budget), ragged=budget < confidence.size)


_KNOWING = {"clairvoyant": Clairvoyant, "informed": Informed, "informed-rate": InformedRate, "oracle": Oracle}


def maker(name: str, gamma: int, believed: CostModel, true: CostModel, trim_ms: float) -> Callable[[], Arm]:
    """What makes one arm per engine, from its name. Raises AdaptiveError."""
    kind, _, settings = name.partition(":")
    if kind == "none":
        return lambda: Fixed(0)
    if kind.startswith("fixed-") and kind[6:].isdigit() and 1 <= int(kind[6:]) <= gamma:
        drafts = int(kind[6:])
        return lambda: Fixed(drafts, drafts if true.narrow_draft_ms and drafts < gamma else 0)
    if kind == "stock":
        return lambda: Stock(believed, gamma)
    if kind == "ours":
        config = _config(settings)
        return lambda: Ours(believed, gamma, config)
    if kind in _KNOWING:
        return lambda: _KNOWING[kind](true, trim_ms)
    raise AdaptiveError(
        f"There is no arm {name!r}; give none, fixed-1 to fixed-{gamma}, stock, ours, clairvoyant, "
        "informed, informed-rate or oracle."
    )


def _config(settings: str) -> PolicyConfig:
    known = {field.name: getattr(PolicyConfig(), field.name) for field in fields(PolicyConfig)}
    known |= {f"skip.{field.name}": getattr(SkipRules(), field.name) for field in fields(SkipRules)}
    values: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        name, _, text = setting.partition("=")
        default = known.get(name)
        try:
            if isinstance(default, bool):
                values[name] = {"true": True, "false": False}[text.lower()]
            elif isinstance(default, int | float):
                values[name] = type(default)(text)
            elif isinstance(default, str):
                values[name] = text
            else:
                raise KeyError(name)
        except (KeyError, ValueError) as error:
            raise AdaptiveError(f"{setting!r} sets no field of PolicyConfig that the simulator can set.") from error
    try:
        skip = {name[5:]: values.pop(name) for name in list(values) if name.startswith("skip.")}
        return PolicyConfig(**values, skip=SkipRules(**skip))
    except ValueError as error:
        raise AdaptiveError(f"The arm ours:{settings} is impossible: {error}.") from error
