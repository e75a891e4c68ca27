"""The decision of one step, in the order it happens, and what is learned from the step afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_adaptive.policy.budget import (
    ALL_WORTH,
    LOW_LOAD,
    TRIMMED,
    Decision,
    needed_gain,
    no_trim_can_gain,
    size_budget,
    verify_all,
)
from sglang_adaptive.policy.calibration import Calibration
from sglang_adaptive.policy.config import PolicyConfig
from sglang_adaptive.policy.correction import CostCorrection, corrected
from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.policy.draft_width import MEASURE, DraftWidths
from sglang_adaptive.policy.explore import Explorer
from sglang_adaptive.policy.mode_choice import ModeChoice
from sglang_adaptive.policy.modes import SIZE as MODE_TIMES
from sglang_adaptive.policy.profile import SurvivalProfile
from sglang_adaptive.policy.rate import BUCKETS, RunningRate
from sglang_adaptive.policy.saturation import SaturationGate
from sglang_adaptive.policy.survival import bounds, count_invalid, survival
from sglang_adaptive.policy.width_choice import WidthCosts, wide_or_narrow

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.integer]

# A corrected table is put into force only when it moved by more than this; each change rebuilds the tables.
_NEWS = 0.005
# What is believed of a first batch, before anything was seen.
_PRIOR_ACCEPTANCE = 0.75
# Drafting goes on for so many steps where that takes long to be corrected.
_LEARN_STEPS = 64
# The profile is a slow mean: while drafting goes on, one step in so many is enough.
_PROFILE_STEPS = 8

__all__ = ["Decision", "Engine", "PolicyConfig"]


class Engine:
    """Sizes the budget of every step and learns from what the steps did.

    There is no clock and no randomness inside: equal calls give equal decisions, so ranks that see the same
    confidences agree. Measured times differ between ranks; what is derived from them comes into force only through
    ``apply_measured``, with the vector of rank 0 on every rank. ``gamma`` is K, the draft tokens per request.
    """

    def __init__(self, config: PolicyConfig, cost: CostModel, gamma: int) -> None:
        self.config = config
        self.gamma = gamma
        self.cost = cost
        self.calibration = Calibration(gamma)
        self.gate = SaturationGate(config.skip)
        self.profile = SurvivalProfile()
        self._prior = _PRIOR_ACCEPTANCE ** np.arange(1, gamma + 1)
        self.invalid_requests = 0
        self.steps = 0
        self._profiled = cost
        # Of the profile: a correction can make a table flat for a while, which is no reason to stop looking.
        self._informative = cost.is_informative
        self._most = gamma if config.max_len is None else min(gamma, config.max_len - 1)
        measures = config.correct_costs and self._informative
        self._compares = measures and config.look_steps > 0 and self._most == gamma
        self._measures_tiers = measures and config.explore_steps > 0
        self._head_known = not (config.calibrate or config.learns_first)
        self.modes = ModeChoice(cost, self.gate, config.look_steps)
        self._explorer = Explorer(cost.tiers, config, gamma)
        self._correction = CostCorrection(cost, config.forget_steps)
        self._correction_in_force = CostCorrection.neutral(cost)
        self._rate = RunningRate()
        self._rates_in_force = np.zeros(BUCKETS)
        self._previous: Decision | None = None
        narrow = [width for width in cost.narrow_draft_ms if config.min_len - 1 <= width < self._most]
        self.draft_widths = DraftWidths(narrow if self._informative else ())
        self._width_costs = WidthCosts(cost, self.draft_widths.widths)

    def size(
        self,
        confidence: Floats,
        *,
        requests: int,
        non_draft_tokens: int,
        kv_tokens: float,
        fresh: Bools,
        weights: Floats | None = None,
        repeated: int = 0,
    ) -> Decision:
        """Decide one step from confidences that are at least one step old.

        ``confidence`` [requests, K] raw; ``fresh`` [requests] says which rows hold a confidence, the others (new
        requests) count as sure. ``non_draft_tokens`` and ``kv_tokens`` are totals of the step. ``weights`` [requests].
        ``repeated`` steps since the last call did as it said (``steady``): looks and probes come no later for them.
        """
        cost, elapsed = self.cost, 1 + repeated
        # 1. What each draft is worth.
        alive = self._believed(confidence, fresh)

        # 2. How much of it pays, with as many drafts as pay.
        width = self.draft_widths.begin(requests, elapsed)
        if width:
            decision = self._best_narrow(width, alive, non_draft_tokens, kv_tokens, weights)
            if self._compares and self.config.narrow_whole and not decision.uniform:
                decision = self._trimmed_or_whole(decision, alive[:, :width], non_draft_tokens, kv_tokens, elapsed)
        else:
            decision = self._best_drafting(alive, cost, non_draft_tokens, kv_tokens, weights)
            if self._compares and not decision.uniform:
                decision = self._trimmed_or_whole(decision, alive, non_draft_tokens, kv_tokens, elapsed)
            # While nothing is drafted all of the drafts are typical ones, of which no column is old.
            if self.draft_widths.compares() or (self.gate.skipping and self.draft_widths.widths):
                decision = self._wide_or_narrow(decision, alive, non_draft_tokens, kv_tokens, weights)

        # 3. Whether drafting pays at all.
        looks = self.draft_widths.looks and not self.gate.skipping
        if self._may_skip and self.profile.mean is not None and not looks:
            saved_ms = self._width_costs.saved_ms(decision.width, requests)
            decision = self.modes.draft_or_not(decision, requests, cost, non_draft_tokens, kv_tokens, elapsed, saved_ms)

        # 4. Once in a long while a step that drafts looks at what is always trimmed, or at another tier.
        if not decision.width:
            decision = self._explorer.look_at_trimmed(decision, alive, cost, non_draft_tokens, kv_tokens, elapsed)
        self._previous = decision
        drafts = decision.draft and not self.gate.skipping
        if self._measures_tiers and drafts and not decision.width:
            decision = self._explorer.measure_tier(decision, alive, cost, non_draft_tokens, kv_tokens, elapsed)
        # A decision for this reason is not repeated, so that each step of a trial is observed.
        return replace(decision, reason=MEASURE) if drafts and self.draft_widths.measures else decision

    def observe(
        self,
        *,
        requests: int,
        non_draft_tokens: int,
        draft_tokens: int,
        kv_tokens: float,
        committed_tokens: int,
        step_ms: float | None = None,
        follows: bool = True,
        drafted: bool = True,
        width: int = 0,
        confidence: Floats | None = None,
        verified: Ints | None = None,
        accepted: Ints | None = None,
    ) -> None:
        """Learn from a finished step; called once per step, in order, also when nothing was measured.

        ``draft_tokens`` were verified over the batch, ``committed_tokens`` came out; ``step_ms`` is None where it was
        not measured; ``follows`` says that it counts from the end of a decode step, False that from this one's launch,
        as after a prefill: then the device waits for the host in it. ``width`` tokens were drafted for each request,
        0 is K; further confidences mean nothing. Per request: the raw ``confidence`` [requests, K]
        that the step drafted with, how many drafts were ``verified`` and how many of those ``accepted`` [requests].
        """
        self.steps += 1
        if step_ms is not None:
            self._learn_time(
                requests, non_draft_tokens, draft_tokens, kv_tokens, committed_tokens, step_ms, drafted, follows, width
            )
        if drafted:
            self.draft_widths.observe(requests, committed_tokens, width)
        if confidence is not None and drafted:
            known = not width or self.profile.mean is not None
            if known and (self.gate.skipping or self.steps % _PROFILE_STEPS == 1):
                alive = self._survival(confidence, bounds(confidence))
                self.profile.observe(alive[:, : width or self.gamma], rare=self.gate.skipping)
            if self.config.calibrate and verified is not None and accepted is not None:
                self.calibration.observe(confidence, verified, accepted)
        if self.config.auto_refresh and self.refresh_due:
            self.apply_measured(self.measured_state())

    @property
    def refresh_due(self) -> bool:
        """True after every ``refresh_steps``-th observed step, the same one on every rank."""
        return self.steps > 0 and self.steps % self.config.refresh_steps == 0

    def measured_state(self) -> Floats:
        """All that depends on this rank's clock, as one vector of fixed length, to be broadcast from rank 0."""
        return np.concatenate([self._rate.rates(), self.modes.state(), self._correction.state()])

    def apply_measured(self, state: Floats) -> None:
        """Bring a ``measured_state`` into force; every rank calls it with the same vector after the same step."""
        if state.size != BUCKETS + MODE_TIMES + self._correction_in_force.size:
            raise ValueError(f"a measured state of {state.size} values does not belong to this engine's cost table")
        self._rates_in_force = state[:BUCKETS].copy()
        self.modes.apply(state[BUCKETS : BUCKETS + MODE_TIMES])
        news = state[BUCKETS + MODE_TIMES :]
        if self.config.correct_costs and _differs(self._correction_in_force, news):
            self._correction_in_force = news.copy()
            self.cost = corrected(self._profiled, news)
            self.cost.prepare(int(self._profiled.tiers[-1]))
            self._width_costs.apply(self.cost)

    def to_dict(self) -> dict[str, Any]:
        """What is worth keeping over a restart, as plain JSON values."""
        return {"gamma": self.gamma, "calibration": self.calibration.to_dict()}

    def load_dict(self, record: Mapping[str, Any]) -> None:
        """Take over a ``to_dict``; raises ``ValueError`` and changes nothing when it does not fit."""
        if not isinstance(record, Mapping) or record.get("gamma") != self.gamma:
            raise ValueError("The saved calibration is for another draft length; it has to be learned again.")
        self.calibration.load_dict(record.get("calibration") or {})

    def _believed(self, confidence: Floats, fresh: Bools) -> Floats:
        """Survivals [requests, K] to size with: requests without history are trusted, or taken as typical; while
        nothing is drafted every request is, since its confidences are from before."""
        typical = self.profile.mean
        if self.gate.skipping and typical is not None:
            return np.repeat(typical[:, None], fresh.size, axis=1).T
        within = least, largest = bounds(confidence)
        alive = self._survival(confidence, within)
        if not (least >= 0.0 and largest <= 1.0):
            self.invalid_requests += count_invalid(confidence[fresh])
        (new,) = (~fresh).nonzero()
        if new.size:
            alive[new] = 1.0 if self.config.trust_new else self._prior if typical is None else typical
        return alive

    def _survival(self, confidence: Floats, within: tuple[float, float]) -> Floats:
        valid = within[0] >= 0.0 and within[1] <= 1.0
        likely = self.calibration.apply(confidence, within=within) if self.config.calibrate else confidence
        return survival(likely, valid=valid, in_place=valid and likely is not confidence)

    def _best_drafting(
        self, alive: Floats, cost: CostModel, non_draft_tokens: int, kv_tokens: float, weights: Floats | None
    ) -> Decision:
        """The best decision with the drafts of ``alive`` [requests, drafts], by the table ``cost`` for so many."""
        (requests, drafts), config = alive.shape, self.config
        gain = needed_gain(config.min_gain, self._previous)
        if self._informative and not cost.is_informative:
            return verify_all(alive, cost, non_draft_tokens, kv_tokens, ALL_WORTH, config.max_len)
        most = requests * min(drafts, self._most)
        if no_trim_can_gain(cost, requests, most, non_draft_tokens, kv_tokens, gain):
            return verify_all(alive, cost, non_draft_tokens, kv_tokens, LOW_LOAD, config.max_len)
        return size_budget(
            alive,
            cost,
            non_draft_tokens,
            kv_tokens,
            rate_tokens_per_ms=self._rate_in_force(requests),
            weights=weights,
            min_gain=config.min_gain,
            min_len=config.min_len,
            max_len=config.max_len,
            trim_ms=config.trim_ms,
            previous=self._previous,
        )

    def _best_narrow(
        self, width: int, alive: Floats, non_draft_tokens: int, kv_tokens: float, weights: Floats | None
    ) -> Decision:
        """The best decision that drafts ``width`` tokens for each request."""
        best = self._best_drafting(alive[:, :width], self._width_costs.at(width), non_draft_tokens, kv_tokens, weights)
        if self.config.narrow_whole:
            return best.of_width(width, best.uniform)
        # Its rows are packed in any case.
        return Decision(best.budget, True, False, best.expected_tokens, best.predicted_ms, TRIMMED, best.gain, width)

    def _trimmed_or_whole(
        self, trimmed: Decision, alive: Floats, non_draft_tokens: int, kv_tokens: float, elapsed: int
    ) -> Decision:
        """``trimmed`` or all the drafts of ``alive``, whichever was measured to be better."""
        width, cost = trimmed.width, self._width_costs.at(trimmed.width)
        saved_ms = self._width_costs.saved_ms(width, alive.shape[0])
        chosen = self.modes.trimmed_or_whole(
            trimmed, alive, cost, non_draft_tokens, kv_tokens, elapsed, width, saved_ms
        )
        return chosen if chosen.width == width else chosen.of_width(width, chosen.uniform)

    def _wide_or_narrow(
        self, wide: Decision, alive: Floats, non_draft_tokens: int, kv_tokens: float, weights: Floats | None
    ) -> Decision:
        """The best of ``wide``, which drafts all K, and of the narrower decisions."""
        requests, costs = alive.shape[0], self._width_costs
        narrow = [
            self._best_narrow(width, alive, non_draft_tokens, kv_tokens, weights) for width in self.draft_widths.widths
        ]

        def measured_ms(of: Decision) -> float:
            saved_ms = costs.saved_ms(of.width, requests)
            return self.modes.measured_ms(of, requests, non_draft_tokens, kv_tokens, saved_ms)

        return wide_or_narrow(wide, narrow, requests, self.draft_widths, costs, measured_ms, self.gate.skipping)

    @property
    def _may_skip(self) -> bool:
        """A head that is only off at the start must not stop the drafting from which it would be corrected."""
        if not self._head_known:
            self._head_known = self.calibration.is_ready or self.steps >= _LEARN_STEPS
        return self._head_known and self.config.skip_draft and self._informative

    def _rate_in_force(self, requests: int) -> float | None:
        if self.config.objective == "ratio":
            return None
        rate = float(self._rates_in_force[RunningRate.bucket(requests)])
        return rate if rate > 0 else None

    def _learn_time(
        self,
        requests: int,
        non_draft_tokens: int,
        draft_tokens: int,
        kv_tokens: float,
        committed_tokens: int,
        step_ms: float,
        drafted: bool,
        follows: bool,
        width: int,
    ) -> None:
        saved_ms = self._width_costs.saved_ms(width, requests)
        tokens, rows = non_draft_tokens + draft_tokens, requests + draft_tokens
        predicted = self.cost.point_ms(requests, tokens, rows, kv_tokens, drafted)
        self._rate.observe(requests, committed_tokens, step_ms, predicted - saved_ms)
        # As if all K had been drafted: what is learned of the rest of a step holds for every width.
        step_ms += saved_ms
        if self.config.correct_costs:
            profiled = self._profiled.point_ms(requests, tokens, rows, kv_tokens, drafted)
            # A shorter draft that no graph fits is packed also where all of it is verified.
            packed = bool(width) and not self.config.narrow_whole
            uniform = draft_tokens == requests * (width or self.gamma) and not packed
            self.modes.observe(requests, drafted, uniform, step_ms, profiled, width)
            if drafted and follows:
                self._correction.observe(requests, non_draft_tokens, draft_tokens, kv_tokens, drafted, step_ms)


def _differs(old: Floats, new: Floats) -> bool:
    moved = np.abs(new[2:] / old[2:] - 1.0).max(initial=0.0) > _NEWS
    slope_moved = abs(new[0] - old[0]) > _NEWS * abs(old[0])
    return bool(moved or slope_moved)
