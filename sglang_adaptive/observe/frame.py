"""One frame of the live view."""

from __future__ import annotations

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sglang_adaptive import ALGORITHM
from sglang_adaptive.observe import view
from sglang_adaptive.observe.fetch import Snapshot
from sglang_adaptive.observe.view import Sums, ratio
from sglang_adaptive.runtime.counters import LOADS

_BAR = 24
_DECISIONS = {
    "verify_all": ("verify all", "cyan"),
    "trimmed": ("trimmed", "green"),
    "not_drafted": ("no draft", "yellow"),
}
_FALLBACKS = {
    "no_cost_table": "no cost table, or a flat one: everything is verified",
    "needs_draft": "structured output or logprobs: drafted all the same",
    "invalid_confidence": "confidences that are no probabilities",
}


def frame(url: str, now: Snapshot, change: Sums | None, trouble: str | None = None) -> RenderableType:
    """The view of ``now``, with what changed since the look before it, or without (None)."""
    total = Sums.of(now)
    gamma = len(total.verified)
    first = now.states[0]
    ranks = sum(len(state.get("ranks", [0])) for state in now.states)
    plugin = " ".join(filter(None, (ALGORITHM, first.get("version"))))
    draft = f"{first.get('family') or ''} K = {gamma} drafts".strip()
    facts = [plugin, draft, "1 rank" if ranks == 1 else f"{ranks} ranks", url]
    title = Text.assemble((now.model, "bold"), "   ", "   ".join(str(fact) for fact in facts if fact))
    parts: list[RenderableType] = [title]
    if trouble:
        parts.append(Text(trouble, style="bold red"))
    if not all(state.get("ragged_verify", True) for state in now.states):
        parts.append(Text("The attention backend verifies uniformly: nothing is trimmed.", style="bold yellow"))
    if not total["steps"]:
        parts.append(Text("No decode step yet: send it a request."))
        return Panel(Group(*parts), box=box.ROUNDED)
    parts += [Text(""), _rates(now, change, total), Text(""), _decisions(change, total)]
    parts += [Text(""), Text("Since start, by position of the draft:", style="dim"), _positions(now, total)]
    parts += [Text(""), Text("Since start, by load, the requests in a step:", style="dim"), _loads(total)]
    fallbacks = [f"{count:.0f} x {_FALLBACKS.get(name, name)}" for name, count in total.fallbacks.items() if count]
    if fallbacks:
        parts.append(Text("fallbacks, steps: " + "; ".join(fallbacks), style="yellow"))
    return Panel(Group(*parts), box=box.ROUNDED)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _rates(now: Snapshot, change: Sums | None, total: Sums) -> Table:
    seconds = change.seconds if change is not None else 0.0
    table = _table("", f"last {seconds:.1f} s" if seconds else "now", "since start", "")
    table.columns[3].justify = "left"
    idle = change is None or not change["steps"]

    def row(name: str, of, pattern: str, note: str = "") -> None:
        recent = None if idle else of(change)
        table.add_row(name, _number(recent, pattern), _number(of(total), pattern), Text(note, style="dim"))

    tokens = None if change is None or not seconds else change["committed_tokens"] / seconds
    table.add_row("output", _number(tokens, "{:.0f} tok/s"), "", Text("of all requests", style="dim"))
    row("speed of one request", lambda s: ratio(1e3 * s["timed_tokens"], s["request_ms"]), "{:.1f} tok/s")
    row("load", lambda s: ratio(s["requests"], s["steps"]), "{:.1f}", "requests in a step")
    row("budget", lambda s: ratio(s["verify_tokens"] - s["requests"], s["steps"]), "{:.1f}", "drafts verified a step")
    most = f"of {len(total.verified) + 1} a request and step"
    row("verified", lambda s: ratio(s["verify_tokens"], s["requests"]), "{:.2f}", most)
    row("accepted", lambda s: ratio(s["committed_tokens"], s["requests"]), "{:.2f}", "tokens out; at least 1")
    row("wasted", lambda s: ratio(100 * s["wasted_tokens"], float(s.verified.sum())), "{:.0f} %", "of verified drafts")
    row("step, measured", lambda s: ratio(s.measured_ms, s.timed_steps), "{:.2f} ms")
    row("step, predicted", lambda s: ratio(s.predicted_ms, s.timed_steps), "{:.2f} ms")
    row("prediction off by", lambda s: ratio(100 * s.error_ms, s.measured_ms), "{:.0f} %", "mean absolute")
    used, raw = (view.calibration(now.states, name) for name in ("error", "raw_error"))
    own = f"draft's own: {_number(raw, '{:.3f}')}"
    table.add_row("calibration error", _number(used, "{:.3f}"), "", Text(own, style="dim"))
    return table


def _decisions(change: Sums | None, total: Sums) -> Table:
    table = _table("decision", "now", "since start", "")
    for name, (label, colour) in _DECISIONS.items():
        recent = None if change is None else view.share(change, name)
        overall = view.share(total, name) or 0.0
        bar = Text("█" * round(_BAR * (overall if recent is None else recent)), style=colour)
        table.add_row(label, _number(recent, "{:.0%}"), f"{overall:.0%}", bar)
    table.columns[3].justify, table.columns[3].width = "left", _BAR
    return table


def _positions(now: Snapshot, total: Sums) -> Table:
    gamma = len(total.verified)
    shown = range(min(gamma, 12))
    table = _table("draft", *(str(position + 1) for position in shown))
    proposed = total.drafted / gamma if gamma else 0.0
    verified = [_number(ratio(total.verified[j], proposed), "{:.0%}") for j in shown]
    accepted = [_number(ratio(total.accepted[j], total.verified[j]), "{:.0%}") for j in shown]
    table.add_row("verified, of proposed", *verified)
    table.add_row("accepted, of verified", *accepted)
    table.add_row("confidence - acceptance", *(_number(view.bias(now.states, j), "{:+.0%}") for j in shown))
    return table


def _loads(total: Sums) -> Table:
    table = _table("requests", "steps", "verified", "accepted", "step ms", "tok/s", "tok/s each")
    load = total.load
    for index in np.flatnonzero(load["steps"]):
        low, high = 1 << index, (2 << index) - 1
        name = str(low) if low == high else f"{low}-{high}" if index < LOADS - 1 else f"{low}+"
        at = {column: float(values[index]) for column, values in load.items()}
        table.add_row(
            name,
            f"{at['steps'] / total['steps']:.0%}",
            _number(ratio(at["verify_tokens"], at["requests"]), "{:.2f}"),
            _number(ratio(at["committed_tokens"], at["requests"]), "{:.2f}"),
            _number(ratio(at["measured_ms"], at["timed_steps"]), "{:.2f}"),
            _number(ratio(1e3 * at["timed_tokens"], at["measured_ms"]), "{:.0f}"),
            _number(ratio(1e3 * at["timed_tokens"], at["request_ms"]), "{:.1f}"),
        )
    return table


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
