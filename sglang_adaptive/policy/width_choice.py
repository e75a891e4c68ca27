"""What steps of each draft width cost, and the choice between the best step of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_adaptive.policy.budget import Decision
from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.policy.draft_width import DraftWidths

# Shorter drafts must save this share of a step.
_LEAST_SAVING = 0.01


class WidthCosts:
    """The cost tables of K and of the shorter ``widths``: ``profiled`` ones, and those in force."""

    def __init__(self, profiled: CostModel, widths: Sequence[int]) -> None:
        self._profiled = {0: profiled, **{width: profiled.drafting(width) for width in widths}}
        self._in_force = dict(self._profiled)

    def apply(self, cost: CostModel) -> None:
        """Bring a corrected table of K into force, and with it those of the other widths."""
        self._in_force = {width: cost.drafting(width) if width else cost for width in self._profiled}

    def at(self, width: int) -> CostModel:
        """The table in force of steps that draft ``width`` tokens; 0 is K."""
        return self._in_force[width]

    def saved_ms(self, width: int, requests: int) -> float:
        """What a draft of ``width`` tokens for each of R requests takes less than one of K, as profiled."""
        if not width:
            return 0.0
        return self._profiled[0].draft_cost(requests) - self._profiled[width].draft_cost(requests)


def wide_or_narrow(
    wide: Decision,
    narrow: Sequence[Decision],
    requests: int,
    widths: DraftWidths,
    costs: WidthCosts,
    measured_ms: Callable[[Decision], float],
    gating: bool,
) -> Decision:
    """The best of ``wide``, which drafts all K, and of the ``narrow`` decisions, one for each of ``widths``.

    ``measured_ms`` says what such a step was measured to take, 0 where that is not known; then both are compared by
    what they are predicted to.
    """
    if not wide.predicted_ms:
        return wide
    tokens, speed = [], []
    for each in narrow:
        tokens.append(each.expected_tokens / wide.expected_tokens)
        if costs.saved_ms(each.width, requests) < _LEAST_SAVING * wide.predicted_ms:
            # Fewer tokens of drafts that take as long bring less, whatever chance makes of it.
            speed.append(0.0)
            continue
        measured = measured_ms(each), measured_ms(wide)
        speed.append(measured[1] / measured[0] if all(measured) else wide.predicted_ms / each.predicted_ms)
    chosen = widths.choose(requests, tokens, speed, gating)
    return narrow[widths.widths.index(chosen)] if chosen else wide
