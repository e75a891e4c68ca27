"""Drafts of fewer than K tokens: when they are made, when all of them is verified, and what is learned of that."""

from __future__ import annotations

import numpy as np
import pytest
from policy_cases import observe, size

from sglang_adaptive.policy.budget import ALL_WORTH, TRIMMED, Decision
from sglang_adaptive.policy.cost import CostModel, VerifySample
from sglang_adaptive.policy.draft_width import (
    COMPARE_STEPS,
    FIRST_TRIAL,
    LEAST_ROWS,
    LOOK_STEPS,
    MEASURE,
    MOST_TRIAL,
    PRICE,
    SETTLED_STEPS,
    STEP_ROWS,
    TRIAL_LOSS,
    DraftWidths,
)
from sglang_adaptive.policy.engine import Engine, PolicyConfig
from sglang_adaptive.policy.mode_choice import LOOK
from sglang_adaptive.policy.modes import NARROW_TRIMMED, NARROW_WHOLE, factors
from sglang_adaptive.policy.steady import WHOLE_IS_FASTER, Steady

GAMMA, WIDTH, REQUESTS = 7, 3, 64
LIKELY = np.full((REQUESTS, GAMMA), 0.7)
# The first draft of half of the requests is worth next to nothing.
MIXED = np.where(np.arange(REQUESTS)[:, None] % 2, 0.05, 0.95) * np.ones(GAMMA)


def table(per_token=0.01, draft_ms=6.0, narrow_ms=2.0):
    """A verification takes 5 ms and something for each token; 64 requests' drafts take so many ms, one's a tenth."""
    verify = [VerifySample(tokens, 0.0, 5.0 + per_token * tokens) for tokens in range(16, 1025, 16)]
    draft, narrow = ([(1, 0.1 * ms), (REQUESTS, ms)] for ms in (draft_ms, narrow_ms))
    return CostModel.from_samples(verify, draft, capture_limit=1024, narrow_draft={WIDTH: narrow})


def engine(cost, **options):
    return Engine(PolicyConfig(calibrate=False, explore_steps=0, **options), cost, GAMMA)


def run(policy, confidence, steps, ms=lambda decision, cost: None):
    """Decisions of so many steps, each of which took ``ms(decision, predicted)``."""
    decisions = []
    for _ in range(steps):
        decision = size(policy, confidence)
        observe(
            policy,
            REQUESTS,
            decision.budget,
            2 * REQUESTS,
            ms(decision, decision.predicted_ms),
            drafted=decision.draft,
            width=decision.width,
            confidence=confidence,
        )
        decisions.append(decision)
    return decisions


def test_the_first_steps_draft_all_and_later_ones_what_pays():
    decisions = run(engine(table()), LIKELY, 40)
    assert [each.width for each in decisions[: SETTLED_STEPS - 1]] == [0] * (SETTLED_STEPS - 1)
    assert all(each.width == WIDTH for each in decisions[SETTLED_STEPS:])
    dear = run(engine(table(narrow_ms=5.9)), LIKELY, 40)
    assert not any(each.width for each in dear), "half of the drafts would save a tenth of a ms"


def test_all_of_a_shorter_draft_is_verified_where_tokens_are_cheap_and_only_the_best_where_they_are_dear():
    whole = run(engine(table()), LIKELY, 20)[-1]
    assert (whole.budget, whole.uniform, whole.width) == (REQUESTS * WIDTH, True, WIDTH)
    assert whole.reason == ALL_WORTH
    trimmed = run(engine(table(per_token=0.03)), MIXED, 20)[-1]
    assert not trimmed.uniform and trimmed.reason == TRIMMED and 0 < trimmed.budget < REQUESTS * WIDTH


def test_where_no_graph_has_the_width_a_shorter_draft_is_packed_in_any_case():
    decision = run(engine(table(), narrow_whole=False), LIKELY, 20)[-1]
    assert (decision.budget, decision.uniform, decision.width) == (REQUESTS * WIDTH, False, WIDTH)


@pytest.mark.parametrize("packing_ms", [0.0, 4.0])
def test_trimming_a_shorter_draft_stops_where_packing_takes_longer_than_it_saves(packing_ms):
    """What trimmed steps take beyond the profile is measured, and so is what whole ones take: a look finds out."""

    def ms(decision, predicted):
        return predicted + packing_ms * (not decision.uniform)

    # The correction of the table would put a part of the packing into the price of tokens.
    policy = engine(table(per_token=0.02), refresh_steps=16)
    policy._correction.observe = lambda *args: None
    decisions = run(policy, MIXED, 3000, ms)
    later = [each for each in decisions[1500:] if each.width]
    whole = sum(each.uniform for each in later) / len(later)
    assert whole > 0.95 if packing_ms else whole < 0.05
    if packing_ms:
        assert {each.reason for each in later if each.uniform} == {WHOLE_IS_FASTER}
    seen = factors(policy.measured_state()[16:].tolist(), REQUESTS)
    assert seen[NARROW_TRIMMED] > 0 and seen[NARROW_WHOLE] > 0


def test_a_shorter_draft_counts_as_the_time_that_it_takes_where_not_drafting_is_weighed():
    """Drafts of K do not pay, those of three do: drafting goes on."""
    poor = np.full((REQUESTS, GAMMA), 0.35)
    policy = engine(table(draft_ms=40.0, narrow_ms=0.1))
    decisions = run(policy, poor, 4000, lambda decision, predicted: predicted)
    assert all(each.draft or each.reason == LOOK for each in decisions[16:])
    wide = [step for step, each in enumerate(decisions) if step >= 16 and each.draft and not each.width]
    looks = [step for step in wide if step - 1 not in wide]
    assert len(wide) == (SETTLED_STEPS - 1) * len(looks), "with the last step of a look it is over"
    assert np.diff(looks).min() > LOOK_STEPS and np.diff(looks)[-1] > 1.9 * np.diff(looks)[0], "ever less often"


def test_widths_are_chosen_by_load_and_looked_at_again():
    widths = DraftWidths((WIDTH,))
    seen = [widths.begin(REQUESTS) for _ in range(SETTLED_STEPS - 1)]
    assert seen == [0] * (SETTLED_STEPS - 1) and not widths.compares()
    widths.begin(REQUESTS)
    assert widths.compares() and widths.choose(REQUESTS, [0.75], [1.4]) == WIDTH
    narrow = [widths.begin(REQUESTS) for _ in range(FIRST_TRIAL - SETTLED_STEPS)]
    assert narrow == [WIDTH] * len(narrow)
    assert widths.begin(REQUESTS) == 0 and widths.looks and widths.measures, "a trial"
    for _ in range(SETTLED_STEPS + LEAST_ROWS // STEP_ROWS):
        for width, tokens in ((0, 4.0), (WIDTH, 3.0)):
            for _ in range(SETTLED_STEPS + LEAST_ROWS // STEP_ROWS):
                widths.observe(REQUESTS, round(tokens * REQUESTS), width)
    while not widths.compares():
        assert widths.begin(REQUESTS) == 0
    assert widths.choose(REQUESTS, [0.75], [1.4]) == WIDTH, "as predicted"
    narrow = [widths.begin(REQUESTS) for _ in range(LOOK_STEPS)]
    narrow += [widths.begin(REQUESTS) for _ in range(LOOK_STEPS)]
    assert narrow == [WIDTH] * len(narrow), "ever less often"
    looks = [(widths.begin(REQUESTS), widths.compares()) for _ in range(SETTLED_STEPS)]
    assert looks == [(0, False)] * (SETTLED_STEPS - 1) + [(0, True)], "old confidences are of three drafts"
    assert widths.looks and widths.choose(REQUESTS, [0.7], [1.4]) == 0
    again = [(widths.begin(REQUESTS), widths.compares()) for _ in range(2 * COMPARE_STEPS)]
    assert not any(width for width, _ in again) and sum(compared for _, compared in again) == 2
    assert widths.begin(4) == 0, "another load has a width of its own"


def test_a_step_that_repeats_a_whole_shorter_draft_fits_its_batch():
    whole = Decision(REQUESTS * WIDTH, True, True, 90.0, 9.0, ALL_WORTH, 0.0, WIDTH)
    steady = Steady(every=4, streak=2)
    for _ in range(3):
        steady.sized(whole, REQUESTS)
    assert steady.repeats(60)
    again = steady.again(whole, 60, GAMMA, [64, 128, 256])
    assert (again.budget, again.uniform, again.width) == (60 * WIDTH, True, WIDTH)


def test_a_batch_that_loses_and_gains_a_request_is_one_load():
    """63 and 64 requests, on either side of a power of two; 40 are others, and so are 128."""
    whole = Decision(REQUESTS * WIDTH, True, True, 90.0, 9.0, ALL_WORTH, 0.0, WIDTH)
    steady = Steady(every=4, streak=6)
    for step in range(7):
        assert not steady.repeats(64 - step % 2)
        steady.sized(whole, 64 - step % 2)
    assert steady.repeats(63) and steady.repeats(65) and not steady.repeats(40)
    assert not steady.repeats(64), "the streak is over"


def steps(widths, count, brought, requests=REQUESTS, predicted=0.7, speed=1.25):
    """So many steps that bring ``brought[width]`` tokens per request; the widths they drafted."""
    drafted = []
    for _ in range(count):
        width = widths.begin(requests)
        if not width and widths.compares():
            width = widths.choose(requests, [predicted], [speed])
        widths.observe(requests, round(brought[width] * requests), width)
        drafted.append(width)
    return drafted


def test_a_width_that_is_predicted_to_lose_is_tried_and_what_it_brought_decides():
    widths = DraftWidths((WIDTH,))
    tokens = {0: 3.0, WIDTH: 2.9}
    drafted = steps(widths, 4000, tokens)
    first = drafted.index(WIDTH)
    assert FIRST_TRIAL <= first <= FIRST_TRIAL + COMPARE_STEPS + SETTLED_STEPS
    assert sum(not width for width in drafted[first:]) < 0.03 * len(drafted), "only looks and trials draft all of K"
    # What it brings falls off.
    tokens[WIDTH] = 2.0
    drafted = steps(widths, 6000, tokens)
    assert not any(drafted[200 : 200 + FIRST_TRIAL])
    assert 0 < sum(map(bool, drafted[200:])) < 2 * PRICE * 6000, "a few trials"


def test_a_text_that_becomes_easy_is_drafted_in_full_again():
    """While shorter drafts are made nothing is seen of those of K: what they brought once must not keep them away."""
    widths = DraftWidths((WIDTH,))
    assert sum(map(bool, steps(widths, 1000, {0: 2.0, WIDTH: 1.9}, predicted=0.9)[-200:])) > 170
    assert sum(map(bool, steps(widths, 400, {0: 6.0, WIDTH: 3.8}, predicted=0.6)[-300:])) < 20, "one trial"
    # Predicted to lose a little, and really better.
    drafted = steps(widths, 10_000, {0: 3.0, WIDTH: 2.7}, predicted=0.78)
    assert sum(not width for width in drafted[1000:]) < 300


def test_a_text_that_gets_no_harder_for_shorter_drafts_is_tried_in_full_in_the_end():
    """Shorter drafts bring what they did, and look as good as they did: only a trial finds that K brings more now."""
    widths = DraftWidths((WIDTH,))
    assert sum(map(bool, steps(widths, 8 * MOST_TRIAL, {0: 3.0, WIDTH: 2.7})[-1000:])) > 960
    drafted = steps(widths, 2 * MOST_TRIAL, {0: 4.0, WIDTH: 2.7})
    assert not any(drafted[-100:])


def test_a_batch_that_alternates_between_two_loads_of_a_bucket_is_one_load():
    widths, drafted = DraftWidths((WIDTH,)), []
    for step in range(1000):
        drafted += steps(widths, 1, {0: 3.0, WIDTH: 2.9}, requests=63 + step % 2, predicted=0.9)
    assert sum(map(bool, drafted)) > 930
    assert widths.begin(20) == 0, "another load has a width of its own"


def test_loads_that_alternate_each_keep_their_width_and_are_looked_at():
    widths, looks = DraftWidths((WIDTH,)), 0
    for step in range(6000):
        requests = 64 if step // 40 % 2 else 16
        width = widths.begin(requests)
        looks += widths.looks
        if not width and widths.compares():
            width = widths.choose(requests, [1.0], [1.1 if requests == 64 else 0.6])
        assert requests == 64 or not width
    assert looks > 2 * SETTLED_STEPS


def test_a_width_that_is_predicted_to_lose_much_is_never_tried_nor_any_while_nothing_is_drafted():
    assert not any(steps(DraftWidths((WIDTH,)), 3000, {0: 3.0, WIDTH: 3.0}, predicted=1.0 - TRIAL_LOSS, speed=0.99))
    widths = DraftWidths((WIDTH,))
    for _ in range(500):
        widths.begin(REQUESTS)
        assert widths.choose(REQUESTS, [0.99], [1.0], gating=True) == 0


def test_what_the_first_steps_after_another_width_bring_does_not_count():
    widths = DraftWidths((WIDTH,))
    widths.begin(REQUESTS)
    for width, tokens in ((0, 100.0), (WIDTH, 100.0)):
        for step in range(40):
            # The first steps of each go on from where the other one left a text.
            widths.observe(REQUESTS, round((1000.0 if step < 4 else tokens) * REQUESTS), width)
    assert widths.brought(0) == widths.brought(WIDTH) == 100.0
    widths.begin(4)
    assert widths.brought(0) == 0.0, "of another load nothing is known"


def test_a_trial_ends_by_what_was_observed_of_it():
    """Of steps that repeat a decision nothing is observed; where that is all of them a trial ends all the same."""
    for every, most in ((1, 300), (8, 2400)):
        widths, drafted = DraftWidths((WIDTH,)), []
        for step in range(6000):
            width = widths.begin(2)
            if not width and widths.compares():
                width = widths.choose(2, [0.7], [1.25])
            if step % every == 0:
                widths.observe(2, 6 if not width else 2, width)
            drafted.append(width)
        trial = drafted.index(WIDTH), len(drafted) - drafted[::-1].index(WIDTH)
        assert LEAST_ROWS // 2 * every <= sum(map(bool, drafted)) < most
        assert every == 8 or trial[1] - trial[0] < 300, "then it costs more than another one is worth"
    widths = DraftWidths((WIDTH,))
    drafted = []
    for _ in range(6000):
        width = widths.begin(2)
        drafted.append(widths.choose(2, [0.7], [1.25]) if not width and widths.compares() else width)
    assert drafted[200] == WIDTH and not any(drafted[4300:4400])


def test_a_few_requests_say_little_and_a_draft_that_takes_as_long_is_never_cut():
    widths = DraftWidths((WIDTH,))
    drafted = steps(widths, SETTLED_STEPS + 14, {0: 3.0, WIDTH: 3.0}, requests=1, predicted=1.0)
    assert not any(drafted), "no choice by one comparison of one request"
    assert any(steps(widths, 4, {0: 3.0, WIDTH: 3.0}, requests=1, predicted=1.0))
    policy = engine(table(narrow_ms=5.97))
    assert not any(each.width for each in run(policy, LIKELY, 2000)), "not even a trial"


def test_steps_of_a_trial_are_not_repeated():
    decisions = run(engine(table()), LIKELY, 300)
    trial = [each for each in decisions[FIRST_TRIAL:] if not each.width]
    assert trial and all(each.reason == MEASURE for each in trial[:SETTLED_STEPS])
    steady = Steady(streak=2)
    for _ in range(9):
        steady.sized(trial[0], REQUESTS)
    assert not steady.repeats(REQUESTS)
