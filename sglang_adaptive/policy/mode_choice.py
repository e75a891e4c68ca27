"""Choosing between no draft, verifying everything and trimming, by what such steps were measured to take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sglang_adaptive.policy.budget import Decision, verify_all
from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.policy.modes import PLAIN, SIZE, Look, ModeTimes, factors, mode_of
from sglang_adaptive.policy.saturation import SaturationGate
from sglang_adaptive.policy.steady import WHOLE_IS_FASTER

Floats = NDArray[np.float64]

LOOK = "no draft: look what a step takes without one"
LOOK_WHOLE = "verify everything: look what such a step takes"
LOOK_TRIMMED = "trimmed: look what such a step takes"
# Where a table says that a trim is so much better, the host's work for it cannot turn that round.
_BEYOND_DOUBT = 1.25


class ModeChoice:
    """Compares the modes, and looks now and then at one that is not chosen.

    ``profiled`` are the costs as profiled, which measured times are compared with; the costs in force come with each
    call. ``gate`` is the engine's. No look comes later than ``look_steps`` steps, 0 never looks. What ``observe``
    learns comes into force only through ``apply``.
    """

    def __init__(self, profiled: CostModel, gate: SaturationGate, look_steps: int) -> None:
        self._profiled, self._gate = profiled, gate
        self._times = ModeTimes()
        self._look_plain = Look(look_steps)
        # At the other one of whole and trimmed steps: with all K drafts, and with fewer.
        self._look_whole, self._look_trimmed = (tuple(Look(look_steps) for _ in range(2)) for _ in range(2))
        # A list: one item of an array at a time is several times slower.
        self._in_force = [0.0] * SIZE

    def observe(
        self, requests: int, drafted: bool, uniform: bool, step_ms: float, profiled_ms: float, width: int = 0
    ) -> None:
        """Count a finished step, ``uniform`` where all that each request drafted (``width``, 0: K) was verified without
        packing; both times as with K."""
        mode = mode_of(drafted, uniform, width)
        self._times.observe(requests, mode, step_ms, profiled_ms)

    def state(self) -> Floats:
        """[``SIZE``] what was measured, of this rank."""
        return self._times.state()

    def apply(self, state: Floats) -> None:
        """Bring a ``state`` into force."""
        self._in_force = state.tolist()

    def trimmed_or_whole(
        self,
        trimmed: Decision,
        alive: Floats,
        cost: CostModel,
        non_draft_tokens: int,
        kv_tokens: float,
        elapsed: int,
        width: int = 0,
        saved_ms: float = 0.0,
    ) -> Decision:
        """Compare the best trim with verifying everything by what such steps were measured to take, where both were.

        ``alive`` [requests, ``width`` or K] of drafts that take ``saved_ms`` less than those of K; ``elapsed`` steps
        after the call before.
        """
        requests = alive.shape[0]
        whole = verify_all(alive, cost, non_draft_tokens, kv_tokens, WHOLE_IS_FASTER)
        seen = factors(self._in_force, requests)
        trimmed_ms, whole_ms = (
            self._measured_ms(
                seen[mode_of(True, uniform, width)], requests, non_draft_tokens, budget, kv_tokens, saved_ms
            )
            for uniform, budget in ((False, trimmed.budget), (True, whole.budget))
        )
        look_whole, look_trimmed = self._look_whole[width > 0], self._look_trimmed[width > 0]
        advantage = trimmed.expected_tokens / (trimmed_ms or trimmed.predicted_ms)
        advantage /= whole.expected_tokens / (whole_ms or whole.predicted_ms)
        if self._gate.skipping:
            # Nothing is drafted but in probes: those are the looks, where the table does not rule whole steps out.
            unknown = not whole_ms and advantage < _BEYOND_DOUBT
            return whole if unknown or (trimmed_ms and whole_ms and advantage < 1.0) else trimmed
        if trimmed_ms and whole_ms and advantage < 1.0:
            due = look_trimmed.due(requests, 1.0 / advantage, elapsed)
            return replace(trimmed, reason=LOOK_TRIMMED) if due else whole
        due = look_whole.due(requests, advantage, elapsed)
        return replace(whole, reason=LOOK_WHOLE) if due else trimmed

    def draft_or_not(
        self,
        drafting: Decision,
        requests: int,
        cost: CostModel,
        non_draft_tokens: int,
        kv_tokens: float,
        elapsed: int,
        saved_ms: float = 0.0,
    ) -> Decision:
        """Compare drafting with not drafting by what their steps were measured to take, where both were, else by the
        table; ``elapsed`` steps after the call before. ``drafting`` takes ``saved_ms`` less than with K drafts."""
        seen = factors(self._in_force, requests)
        plain, drafted = seen[PLAIN], seen[mode_of(True, drafting.uniform, drafting.width)]
        draft_ms = measured_ms = drafting.predicted_ms
        if drafted:
            measured_ms = self._measured_ms(drafted, requests, non_draft_tokens, drafting.budget, kv_tokens, saved_ms)
        profiled_ms = self._profiled.point_ms(requests, non_draft_tokens, requests, kv_tokens, draft=False)
        if plain and drafted:
            draft_ms, plain_ms = measured_ms, plain * profiled_ms
        else:
            # A measured time has the host's work in it, and the table's has not: only a look can compare the two.
            plain_ms = cost.point_ms(requests, non_draft_tokens, requests, kv_tokens, draft=False)
        decision = self._gate.decide(drafting.at_cost(draft_ms), plain_ms, requests, elapsed)
        if drafted and requests and decision.draft and not self._gate.skipping:
            # Drafting steps say nothing good or bad about plain ones: where those are unknown, the profile's time.
            rival_ms = plain * profiled_ms if plain else profiled_ms
            advantage = drafting.expected_tokens / measured_ms * rival_ms / requests
            if self._look_plain.due(requests, advantage, elapsed):
                return Decision(0, False, False, float(requests), plain_ms, LOOK)
        return decision

    def measured_ms(
        self, decision: Decision, requests: int, non_draft_tokens: int, kv_tokens: float, saved_ms: float
    ) -> float:
        """What steps like ``decision``, which drafts, were measured to take; 0 where that is not known."""
        factor = factors(self._in_force, requests)[mode_of(True, decision.uniform, decision.width)]
        return self._measured_ms(factor, requests, non_draft_tokens, decision.budget, kv_tokens, saved_ms)

    def _measured_ms(
        self,
        factor: float,
        requests: int,
        non_draft_tokens: int,
        draft_tokens: int,
        kv_tokens: float,
        saved_ms: float,
    ) -> float:
        """What a step that drafts was measured to take, by the ``factor`` of its mode; 0 where that is not known."""
        if not factor:
            return 0.0
        tokens, rows = non_draft_tokens + draft_tokens, requests + draft_tokens
        profiled_ms = self._profiled.point_ms(requests, tokens, rows, kv_tokens)
        # Never as little as nothing, whatever was measured.
        return max(factor * profiled_ms - saved_ms, 0.05 * profiled_ms)
