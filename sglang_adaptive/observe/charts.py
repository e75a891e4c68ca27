"""The charts of the report, each with a caption that says what to look for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sglang_adaptive.observe.reliability import Curve
from sglang_adaptive.observe.summary import Summary
from sglang_adaptive.observe.svg import Axis, Plot, span
from sglang_adaptive.policy import budget, draft_width, explore, mode_choice, saturation, steady

# Okabe and Ito's colours, which people with any colour vision can tell apart.
BLUE, ORANGE, GREEN, RED, SKY, PINK, YELLOW = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#f0e442",
)  # fmt: skip
GREY, PALE = "#8a94a0", "#d9dee4"
MOST_POSITIONS = 16
_IN_LINE = 66.0
_FEW = 10  # a bin of fewer drafts says nothing
# A name short enough for a legend, and a colour. What verifies everything is blue, what trims green, no draft orange.
REASONS = {
    budget.LOW_LOAD: ("verify all: low load", SKY),
    budget.SMALL_GAIN: ("verify all: no trim gains enough", BLUE),
    budget.ALL_WORTH: ("verify all: every draft is worth it", "#004c77"),
    budget.NO_TABLE: ("verify all: no cost table, or a flat one", RED),
    budget.TRIMMED: ("trimmed", GREEN),
    saturation.SATURATED: ("no draft: costs more than it gains", ORANGE),
    mode_choice.LOOK: ("no draft: a look", YELLOW),
    steady.WHOLE_IS_FASTER: ("verify all: faster than the best trim", "#2f7fb5"),
    mode_choice.LOOK_WHOLE: ("verify all: a look", "#a6cfe8"),
    mode_choice.LOOK_TRIMMED: ("trimmed: a look", "#9bd8b4"),
    saturation.PROBE: ("probe: does drafting pay again?", PINK),
    explore.EXPLORE: ("explore: verify all", "#7b5ea7"),
    explore.EXPLORE_TIER: ("explore: another tier", "#b79fd8"),
    draft_width.MEASURE: ("measure: what a width brings", "#d3b3c6"),
}


@dataclass(frozen=True)
class Chart:
    """A picture (one SVG, or several small ones), its title, and what to look for."""

    name: str
    title: str
    caption: str
    svg: str
    wide: bool = False


def charts(summary: Summary) -> list[Chart]:
    """All charts that the trace has data for, in the order of the page."""
    made = [make(summary) for make in ALL]
    return [chart for chart in made if chart is not None]


def _lengths_axis(gamma: int, name: str = "tokens per request and step") -> Axis:
    step = max(1, (gamma + 1) // 8)
    return Axis(0, gamma + 1.4, name, named=[(float(n), str(n)) for n in range(0, gamma + 2, step)])


def _over_time(s: Summary) -> Chart:
    time = s.over_time
    steps = Axis(0, float(s.steps), "decode step")
    lengths = Plot(
        "budget-time", "Verified and accepted length over time", steps, _lengths_axis(s.gamma), 1100, 260, _IN_LINE
    )
    ends = np.array([0.0, s.steps])
    lengths.line(ends, np.full(2, s.gamma + 1.0), GREY, "proposed (K + 1)", "5 4")
    lengths.area(time.step, time.accept_length, time.verify_length, PALE, "verified in vain")
    lengths.line(time.step, time.verify_length, BLUE, "verified")
    lengths.line(time.step, time.accept_length, GREEN, "accepted")
    load = Plot(
        "load-time",
        "Load over time",
        steps,
        Axis(*span(time.requests, zero=True), "requests in a step"),
        1100,
        150,
        _IN_LINE,
    )
    load.area(time.step, np.zeros_like(time.step), time.requests, PALE)
    load.line(time.step, time.requests, "#52606d")
    return Chart(
        "budget-time",
        "Verification budget over time, and the load beside it",
        "In a step a request can have K + 1 tokens verified: K drafts and the token before them, the anchor (dashed). "
        "The blue line is how many of them were verified, the green one how many came out. When the load below rises "
        "and blue falls towards green, it works: less is verified in vain (the grey area). Blue at 1 means that those "
        "steps did not draft.",
        lengths.svg() + load.svg(),
        wide=True,
    )


def _by_load(s: Summary) -> Chart:
    at = np.arange(len(s.loads), dtype=float)
    plot = Plot("budget-load", "Length by load", _load_axis(s), _lengths_axis(s.gamma))
    plot.line(np.array([-0.5, len(s.loads) - 0.5]), np.full(2, s.gamma + 1.0), GREY, "proposed (K + 1)", "5 4")
    verified, accepted = (np.array([getattr(x, f"{n}_length") for x in s.loads]) for n in ("verify", "accept"))
    for x, length, load in zip(at, verified, s.loads, strict=True):
        plot.bar(x - 0.18, 0.34, 0, length, BLUE, f"{load.name} requests: {length:.2f} verified, {load.steps} steps")
    for x, length, load in zip(at, accepted, s.loads, strict=True):
        plot.bar(x + 0.18, 0.34, 0, length, GREEN, f"{load.name} requests: {length:.2f} accepted")
    plot.legend("verified", BLUE)
    plot.legend("accepted", GREEN)
    return Chart(
        "budget-load",
        "Verification budget by load",
        "The same by the number of requests in a step. Blue bars that shrink to the right are load-aware verification. "
        "Bars of equal height mean that a verified token costs next to nothing at these loads, or that there was no "
        "cost table: the decisions below say which.",
        plot.svg(),
    )


def _load_axis(s: Summary) -> Axis:
    names = [(float(index), load.name) for index, load in enumerate(s.loads)]
    return Axis(-0.5, len(s.loads) - 0.5, "requests in a step", named=names)


def _pareto(s: Summary) -> Chart | None:
    user, server = (np.array([getattr(load, f"{name}_rate") for load in s.loads]) for name in ("user", "server"))
    if not np.isfinite(user).any():
        return None
    x = Axis(*span(user, zero=True), "speed of one request, tokens/s")
    plot = Plot(
        "pareto", "Throughput against interactivity", x, Axis(*span(server, zero=True), "whole server, tokens/s")
    )
    plot.line(user, server, BLUE)
    tips = [f"{load.name} requests: {load.server_rate:.0f} tok/s, {load.user_rate:.1f} for each" for load in s.loads]
    plot.dots(user, server, BLUE, radius=5, tips=tips)
    for a, b, load in zip(user, server, s.loads, strict=True):
        plot.text(a, b, load.name, dx=8, dy=-7)
    return Chart(
        "pareto",
        "Pareto position",
        "One dot for each load, named by its requests. Up: more work done. Right: a faster answer for each user. The "
        "load moves along the line; a better policy moves the line up and to the right. Decode time only, from step to "
        "step: prefill and waiting are not in it. Compare it with the report of another run of the same work.",
        plot.svg(),
    )


def _cost(s: Summary) -> Chart | None:
    drafting, plain = s.drafting_cost, s.plain_cost
    if not drafting.tokens.size + plain.tokens.size:
        return None
    tokens = np.concatenate([drafting.tokens, plain.tokens])
    ms = np.concatenate([part for c in (drafting, plain) for part in (c.low, c.measured, c.predicted)])
    highs = np.concatenate([drafting.measured, plain.measured])
    wild = np.concatenate([drafting.high, plain.high])
    x = Axis(*span(tokens, log=True), "tokens verified in a step (log scale)", log=True)
    y = Axis(*span(ms, np.minimum(wild, 2 * highs.max()), zero=True), "time of a step, ms")
    plot = Plot("cost", "Step time by tokens verified", x, y)
    for cost, colour, dark, name in ((drafting, SKY, BLUE, "with a draft"), (plain, "#f3c982", RED, "without")):
        if cost.tokens.size:
            plot.whiskers(cost.tokens, cost.low, cost.high, colour)
            tips = [
                f"{tokens:.0f} tokens: {ms:.2f} ms measured (median of {count:.0f})"
                for tokens, ms, count in zip(cost.tokens, cost.measured, cost.count, strict=True)
            ]
            plot.dots(cost.tokens, cost.measured, colour, f"measured, {name}", tips=tips)
            if np.isfinite(cost.predicted).any():
                plot.line(cost.tokens, cost.predicted, dark, f"predicted, {name}")
    return Chart(
        "cost",
        "What a step costs: predicted and measured",
        "Dots are measured medians (bars: 10th to 90th percentile), lines what the policy believed. Where the line is "
        "flat, more tokens are free and nothing is trimmed; where it climbs in stairs, a trim pays that reaches the "
        "next stair down. Lines that run beside the dots for long mean a wrong table: start with "
        "SGLANG_ADAPTIVE_PROFILE=refresh.",
        plot.svg(),
    )


def _decisions(s: Summary) -> Chart:
    plot = Plot("decisions", "Decisions by load", _load_axis(s), Axis(0, 1, "share of the steps", percent=True))
    for reason, (name, colour) in _reason_styles(s.reasons).items():
        shares = [load.reasons[reason] for load in s.loads]
        if not any(shares):
            continue
        plot.legend(name, colour)
        for x, load in enumerate(s.loads):
            below = sum(load.reasons[each] for each in _reason_styles(s.reasons) if _before(s, each, reason))
            if load.reasons[reason]:
                tip = f"{load.name} requests: {name}, {load.reasons[reason]:.1%} of {load.steps} steps"
                plot.bar(x, 0.7, below, below + load.reasons[reason], colour, tip)
    return Chart(
        "decisions",
        "Decisions and their reasons, by load",
        "Blue: every draft was verified. Green: the batch was trimmed to the drafts that are worth their cost. Orange: "
        "no draft at all. The usual picture is blue on the left, green in the middle and, where drafting does not pay "
        "at high load, orange on the right. Probes, looks and explorations try what is not in use, to see whether it "
        "has become the faster: they should be slivers.",
        plot.svg(),
    )


def _before(s: Summary, one: int, other: int) -> bool:
    order = list(_reason_styles(s.reasons))
    return order.index(one) < order.index(other)


def _reason_styles(reasons: list[str]) -> dict[int, tuple[str, str]]:
    """Name and colour by the trace's number, in the order of ``REASONS``; those that we do not know come last."""
    known = [reasons.index(reason) for reason in REASONS if reason in reasons]
    rest = [index for index in range(len(reasons)) if index not in known]
    return {
        index: REASONS[reasons[index]] if index in known else (reasons[index][:48], GREY) for index in [*known, *rest]
    }


def _positions(s: Summary) -> Chart | None:
    if not s.proposed.sum():
        return None
    shown = min(s.gamma, MOST_POSITIONS)
    named = [(float(j), str(j + 1)) for j in range(shown)]
    axis = Axis(-0.5, shown - 0.5, "position of the draft in its block", named=named)
    plot = Plot("waste", "Fate of drafts by position", axis, Axis(0, 1, "share of the proposed drafts", percent=True))
    for name, colour in (("accepted", GREEN), ("verified in vain", RED), ("not verified", PALE)):
        plot.legend(name, colour)
    for j in range(shown):
        accepted, verified = s.accepted[j] / s.proposed[j], s.verified[j] / s.proposed[j]
        tip = f"draft {j + 1}: {accepted:.1%} accepted, {verified - accepted:.1%} in vain, {1 - verified:.1%} not"
        plot.bar(j, 0.75, 0, accepted, GREEN, tip)
        plot.bar(j, 0.75, accepted, verified, RED, tip)
        plot.bar(j, 0.75, verified, 1, PALE, tip)
    return Chart(
        "waste",
        "Waste by position",
        "What became of the drafts at each position. Red is the waste: it took room in a step and was rejected, itself "
        "or one before it. Grey was proposed and not verified, which is nearly free. Fixed-length speculation has no "
        "grey: all of it would be red or green.",
        plot.svg(),
    )


def _lengths(s: Summary) -> Chart:
    named = [(float(j), str(j + 1)) for j in range(s.gamma + 1)][:: max(1, (s.gamma + 1) // 16)]
    axis = Axis(-0.5, s.gamma + 0.5, "tokens that a request got from a step", named=named)
    plot = Plot(
        "lengths",
        "Accepted length",
        axis,
        Axis(*span(s.lengths, zero=True), "share of requests and steps", percent=True),
    )
    for j, value in enumerate(s.lengths):
        plot.bar(j, 0.75, 0, value, GREEN, f"{j + 1} tokens: {value:.1%}")
    mean = s.tokens / s.requests
    return Chart(
        "lengths",
        "Accepted length",
        f"How many tokens a request got from one step; {mean:.2f} on average. 1 is what decoding without speculation "
        "gives. A tall last bar says that a longer block would pay; a tall first one that the draft is weak or that "
        "little was verified.",
        plot.svg(),
    )


def _calibration(s: Summary) -> Chart | None:
    raw, online = s.reliability.raw, s.reliability.online
    if raw is None or online is None:
        return None
    shown = [j for j in range(s.gamma) if raw.count[j].max() >= _FEW][:MOST_POSITIONS]
    if not shown:
        return None
    small = [_reliability_plot(j, raw, online).svg() for j in shown]
    limited = "" if s.reliability.steps >= s.drafted_steps else f" Of the last {s.reliability.steps} drafting steps."
    return Chart(
        "calibration",
        "Calibration by position: is a confidence of 0.8 accepted 8 times in 10?",
        "On the diagonal: yes. Below it the draft is too sure of itself, so that too much is verified; above it too "
        "timid. Orange is the draft's own confidence, blue the one that decides, after the online calibration (learned "
        "again here from the trace; each step is judged before it is learned from). Larger dots hold more drafts. "
        f"Expected calibration error over all positions: {raw.overall:.3f} as it comes, {online.overall:.3f} "
        f"calibrated.{limited}",
        f'<div class="grid">{"".join(small)}</div>',
        wide=True,
    )


def _reliability_plot(j: int, raw: Curve, online: Curve) -> Plot:
    title = f"draft {j + 1}: error {raw.error[j]:.3f}, calibrated {online.error[j]:.3f}"
    plot = Plot(
        f"calibration-{j + 1}", title, Axis(0, 1, f"confidence, draft {j + 1}"), Axis(0, 1, "accepted"), 270, 240
    )
    plot.line(np.array([0.0, 1.0]), np.array([0.0, 1.0]), GREY, dash="4 4", width=1.2)
    for curve, colour, name in (
        (raw, ORANGE, f"own {raw.error[j]:.3f}"),
        (online, BLUE, f"used {online.error[j]:.3f}"),
    ):
        share = curve.count[j] / curve.count[j].sum()
        tips = [f"{n:.0f} drafts" for n in curve.count[j]]
        accepted = np.where(curve.count[j] >= _FEW, curve.accepted[j], np.nan)
        plot.line(curve.confidence[j], accepted, colour, width=1.6)
        plot.dots(curve.confidence[j], accepted, colour, name, 2 + 7 * np.sqrt(share), tips)
    return plot


ALL: tuple[Callable[[Summary], Chart | None], ...] = (
    _over_time, _by_load, _pareto, _decisions, _cost, _positions, _lengths, _calibration,
)  # fmt: skip
