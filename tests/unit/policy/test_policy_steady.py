"""A decision that has been the same for long is repeated, and only such a one."""

from __future__ import annotations

import pytest

from sglang_adaptive.policy.budget import LOW_LOAD, TRIMMED, Decision
from sglang_adaptive.policy.mode_choice import LOOK, LOOK_TRIMMED, LOOK_WHOLE
from sglang_adaptive.policy.saturation import PROBE, SATURATED
from sglang_adaptive.policy.steady import Steady

WHOLE = Decision(7, True, True, 1.5, 3.0, LOW_LOAD)
PLAIN = Decision(0, False, False, 1.0, 2.0, SATURATED)
TRIM = Decision(12, True, False, 9.0, 3.0, TRIMMED)


def schedule(steady: Steady, decisions: list[Decision], requests: int = 1) -> str:
    """S for a step that was sized, r for one that repeated."""
    steps = ""
    for decision in decisions:
        if steady.repeats(requests):
            steps += "r"
        else:
            steady.sized(decision, requests)
            steps += "S"
    return steps


@pytest.mark.parametrize("decision", [WHOLE, PLAIN])
def test_one_step_in_four_is_sized_after_a_streak(decision: Decision) -> None:
    assert schedule(Steady(every=4, streak=3), [decision] * 14) == "SSSSrrrSrrrSrr"


@pytest.mark.parametrize(
    "other",
    [
        Decision(3, True, False, 1.5, 3.0, LOOK_TRIMMED),
        Decision(0, False, False, 1.0, 2.0, LOOK),
        Decision(7, True, True, 1.0, 2.0, LOOK_WHOLE),
        Decision(7, True, True, 1.0, 2.0, PROBE),
    ],
    ids=lambda decision: decision.reason,
)
def test_another_decision_ends_the_streak_and_does_not_repeat_itself(other: Decision) -> None:
    steady = Steady(every=4, streak=3)
    assert schedule(steady, [WHOLE] * 7) == "SSSSrrr"
    assert schedule(steady, [other] * 9) == "S" * 9
    assert schedule(steady, [WHOLE] * 6) == "SSSSrr"


def test_trims_on_end_are_one_decision_whatever_their_budget() -> None:
    steady = Steady(every=4, streak=9, every_trim=3, streak_trim=2, learn_steps=0)
    trims = [Decision(budget, True, False, 9.0, 3.0, TRIMMED) for budget in (12, 13, 11, 12, 9, 12, 12, 14, 12)]
    assert schedule(steady, trims, requests=4) == "SSSrrSrrS"
    assert schedule(steady, [WHOLE] * 4, requests=4) == "rrSS"


def test_no_trim_is_repeated_while_every_step_is_learned_from_nor_where_none_may_be() -> None:
    assert schedule(Steady(every_trim=3, streak_trim=2, learn_steps=6), [TRIM] * 10) == "S" * 6 + "rrSr"
    assert schedule(Steady(every_trim=0, streak_trim=2, learn_steps=0), [TRIM] * 10) == "S" * 10


@pytest.mark.parametrize(
    ("requests", "budget"),
    [
        (4, 12),  # as it was
        (5, 19),  # 20 tokens are as far from 16 as from 24
        (6, 18),  # 24 tokens are an edge
        (3, 13),  # 12 tokens fit into 16
    ],
)
def test_a_trim_is_repeated_at_the_nearest_edge(requests: int, budget: int) -> None:
    steady = Steady()
    steady.sized(TRIM, 4)
    again = steady.again(TRIM, requests, 7, [16, 24, 32])
    assert (again.budget, again.reason, again.uniform) == (budget, TRIMMED, False)


def test_a_repeated_trim_that_comes_to_everything_needs_no_shares() -> None:
    steady = Steady()
    steady.sized(TRIM, 4)
    again = steady.again(TRIM, 2, 7, [16, 24])  # 8 tokens fit into 16, as many as two requests have
    assert (again.budget, again.uniform, again.draft) == (14, True, True)


def test_a_repeated_trim_keeps_to_the_bounds_of_each_request() -> None:
    steady = Steady()
    steady.sized(TRIM, 4)
    assert steady.again(TRIM, 7, 7, [8, 16, 64], least=2).budget == 14
    assert steady.again(TRIM, 2, 7, [16], most=4).budget == 8


def test_a_trim_beyond_the_tiers_or_without_any_keeps_its_share() -> None:
    steady = Steady()
    steady.sized(TRIM, 4)
    assert steady.again(TRIM, 40, 7, [16, 24, 32]).budget == steady.again(TRIM, 40, 7, []).budget == 120


def test_drafting_and_not_drafting_are_two_decisions() -> None:
    steady = Steady(every=4, streak=3)
    assert schedule(steady, [WHOLE] * 7 + [PLAIN] * 5) == "SSSSrrr" + "SSSSr"


def test_another_load_is_sized_at_once() -> None:
    steady = Steady(every=4, streak=3)
    assert schedule(steady, [WHOLE] * 5, requests=4) == "SSSSr"
    # Half as many again are the same load, and so are 3.
    assert schedule(steady, [WHOLE], requests=6) == "r"
    assert schedule(steady, [WHOLE] * 5, requests=7) == "SSSSr"
    assert schedule(steady, [WHOLE] * 5, requests=4) == "SSSSr"


def test_the_last_repeat_is_known() -> None:
    steady = Steady(every=4, streak=0)
    steady.sized(WHOLE, 1)
    steady.sized(WHOLE, 1)
    left = []
    while steady.repeats(1):
        left.append(steady.left)
    assert left == [2, 1, 0]


def test_a_repeated_decision_fits_the_requests_of_its_step() -> None:
    assert WHOLE.for_requests(1, 7) is WHOLE
    assert WHOLE.for_requests(3, 7).budget == 21
    assert PLAIN.for_requests(5, 7) is PLAIN
