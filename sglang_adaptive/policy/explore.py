"""Trying, now and then, what looks worse than the best: only what is verified or measured can be corrected."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sglang_adaptive.policy.budget import Decision, verify_all
from sglang_adaptive.policy.config import PolicyConfig
from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.policy.modes import PRICE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EXPLORE = "verify everything: look at what was trimmed for long"
EXPLORE_TIER = "explore: measure a tier whose cost is only believed"
# A little more than a correction needs, since the clock does not run in every step.
BURST_STEPS = 10
_FIRST_INTERVAL = 32
_LEAST_VALUE = 0.8
# A burst may cost this share of the steps since the one before it.
_PRICE = 0.01
_HALVINGS = 4
_BUCKETS = 24


class Explorer:
    """Turns the decision to draft, now and then, into one that shows more: of the drafts that are always trimmed, and
    of the costs of other tiers. Steps and decisions are its only inputs. ``gamma`` is K.

    In each method ``alive`` [requests, K] are the survivals that ``decision`` was made with, and ``elapsed`` the steps
    since the call before.
    """

    def __init__(self, tiers: Ints, config: PolicyConfig, gamma: int) -> None:
        self._config, self._gamma = config, gamma
        self._most = gamma if config.max_len is None else min(gamma, config.max_len - 1)
        self._tiers = TierExplorer(tiers, config.explore_steps, config.forget_steps)
        self._trimmed_on_end = 0

    def look_at_trimmed(
        self,
        decision: Decision,
        alive: Floats,
        cost: CostModel,
        non_draft_tokens: int,
        kv_tokens: float,
        elapsed: int,
    ) -> Decision:
        """Verify everything where nothing was for ``explore_steps`` steps and that costs little."""
        if decision.budget == alive.shape[0] * self._most:
            self._trimmed_on_end = 0
            return decision
        self._trimmed_on_end += elapsed
        due = self._config.explore_steps and self._trimmed_on_end > self._config.explore_steps
        if not due or not decision.draft:
            return decision
        look = verify_all(alive, cost, non_draft_tokens, kv_tokens, EXPLORE, self._config.max_len)
        # What the look costs, in steps like this one, may be a small share of the steps since the last.
        price = look.predicted_ms / decision.predicted_ms - look.expected_tokens / decision.expected_tokens
        if price > PRICE * self._trimmed_on_end:
            return decision
        self._trimmed_on_end = 0
        return look

    def measure_tier(
        self,
        decision: Decision,
        alive: Floats,
        cost: CostModel,
        non_draft_tokens: int,
        kv_tokens: float,
        elapsed: int,
    ) -> Decision:
        """Verify as many tokens as another tier holds, where ``TierExplorer`` says so."""
        requests = alive.shape[0]
        least, most = requests * min(self._most, self._config.min_len - 1), requests * self._most

        def look(tokens: int) -> Decision:
            budget, open_tokens = tokens - non_draft_tokens, alive[:, : self._most]
            # The last of the sorted survivals: with a minimum length this is a little too good, which is good enough.
            expected = requests + float(np.sort(open_tokens, axis=None)[open_tokens.size - budget :].sum())
            ms = cost.point_ms(requests, tokens, requests + budget, kv_tokens)
            return Decision(budget, True, budget == requests * self._gamma, expected, ms, EXPLORE_TIER)

        def worth(tokens: int) -> float:
            other = look(tokens)
            return other.expected_tokens / other.predicted_ms / (decision.expected_tokens / decision.predicted_ms)

        here = non_draft_tokens + decision.budget
        there = self._tiers.tokens(here, non_draft_tokens + least, non_draft_tokens + most, worth, elapsed)
        return decision if there == here else look(there)


class TierExplorer:
    """A table that is wrong about the tiers it never uses stays wrong: in particular one that is falsely flat makes
    everything be verified. So a burst of steps goes to a tier between the current one and the fewest (or, in turn, the
    most) tokens the batch could verify: halfway in log tokens, nearer while that looks too dear (a hundredth of the
    steps since the last burst, and never more than a fifth of each step). A tier that was used lately is known and left
    alone.

    The first burst comes after 32 steps at a load (power of two of requests), the next one after twice as many, and so
    on up to ``longest_interval``: in the long run at most a fifth of 10 steps per interval is lost. Steps and decisions
    are its only inputs, so all ranks explore alike.
    """

    def __init__(self, tiers: Ints, longest_interval: int, forget_steps: int) -> None:
        # Lists: one item of an array at a time is several times slower.
        self.tiers: list[int] = tiers.tolist()
        self.longest, self.forget = longest_interval, forget_steps
        self._uses, self._used_at = [0] * len(self.tiers), [0] * len(self.tiers)
        self._interval = [min(_FIRST_INTERVAL, max(longest_interval, 1))] * _BUCKETS
        self._waited = [0] * _BUCKETS
        self._steps = 0
        self._down = False
        self._burst_left = 0
        self._burst_tokens = 0

    def tokens(self, tokens: int, least: int, most: int, worth: Callable[[int], float], elapsed: int = 1) -> int:
        """What this step should verify where ``tokens`` is best and ``least`` to ``most`` are possible, ``elapsed``
        steps after the call before.

        ``worth`` says, for a number of tokens, the predicted tokens per ms relative to the best.
        """
        self._steps += elapsed
        chosen = tokens
        if self._burst_left and least <= self._burst_tokens <= most:
            self._burst_left -= 1
            chosen = self._burst_tokens
        else:
            self._burst_left = 0
            bucket = min(least.bit_length(), _BUCKETS - 1)
            self._waited[bucket] += elapsed
            if self._waited[bucket] >= self._interval[bucket]:
                affordable = 1.0 - _PRICE * self._waited[bucket] / BURST_STEPS
                self._waited[bucket] = 0
                self._interval[bucket] = min(2 * self._interval[bucket], self.longest)
                chosen = self._unknown(tokens, least, most, worth, max(affordable, _LEAST_VALUE))
                self._burst_tokens, self._burst_left = chosen, BURST_STEPS - 1 if chosen != tokens else 0
        self._use(chosen)
        return chosen

    def _unknown(self, tokens: int, least: int, most: int, worth: Callable[[int], float], least_value: float) -> int:
        for _ in range(2):
            self._down = not self._down
            away = float(least if self._down else most)
            for _ in range(_HALVINGS):
                away = (away * tokens) ** 0.5
                there = self.tiers[self._held_by(math.ceil(away))]
                if not least <= there <= most or self._tier(there) == self._tier(tokens):
                    break
                if worth(there) >= least_value:
                    if self._is_known(there):
                        break
                    return there
        return tokens

    def _tier(self, tokens: int) -> int:
        return bisect_left(self.tiers, tokens)

    def _held_by(self, tokens: int) -> int:
        """The tier's place; tokens beyond the table count for its last tier."""
        return min(bisect_left(self.tiers, tokens), len(self.tiers) - 1)

    def _is_known(self, tokens: int) -> bool:
        tier = self._held_by(tokens)
        return self._uses[tier] >= BURST_STEPS and self._steps - self._used_at[tier] <= self.forget

    def _use(self, tokens: int) -> None:
        tier = self._held_by(tokens)
        if self._steps - self._used_at[tier] > self.forget:
            self._uses[tier] = 0
        self._uses[tier] += 1
        self._used_at[tier] = self._steps
