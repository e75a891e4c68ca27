"""The report as one HTML page that needs nothing else: no script, no network, no file beside it."""

from __future__ import annotations

import html
from importlib import resources

from sglang_adaptive import __version__
from sglang_adaptive.observe.charts import Chart, charts
from sglang_adaptive.observe.summary import Summary

# Whatever a hostile trace may smuggle in, the browser loads and runs nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_LONGEST = 120


def page(summary: Summary, name: str) -> str:
    """The page for a trace called ``name``."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(name)}: what sglang_adaptive decided</title><style>{_style()}</style></head>"
    )
    body = [
        "<h1>What sglang_adaptive decided, and how it worked out</h1>",
        f'<p class="meta">{html.escape(_about(summary, name))}</p>',
        *(f'<p class="notice">{html.escape(text)}</p>' for text in _notices(summary)),
        f'<section class="tiles">{"".join(_tiles(summary))}</section>',
        f'<section class="page">{"".join(map(_figure, charts(summary)))}</section>',
        f"<footer>sglang_adaptive {__version__}. Point at a mark to see its number.</footer>",
    ]
    return f"{head}<body><main>{''.join(body)}</main></body></html>\n"


def _style() -> str:
    return resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8")


def _about(s: Summary, name: str) -> str:
    known = [f"{key} {value}"[:_LONGEST] for key, value in list(s.meta.items())[:12] if value != "None"]
    return " · ".join([name, f"K = {s.gamma} drafts a request and step", *known])


def _notices(s: Summary) -> list[str]:
    notices = []
    if s.truncated:
        notices.append("The trace ends in the middle of a block: the server was killed, or is still writing it.")
    if s.lost:
        notices.append(f"{s.lost} steps could not be recorded and are missing.")
    return notices


def _tiles(s: Summary) -> list[str]:
    verified, accepted = float(s.verified.sum()), float(s.accepted.sum())
    # Every verified token that is no draft is an anchor, one for each request and step.
    values = [
        (f"{s.steps:,}", "decode steps"),
        (f"{s.tokens:,.0f}", f"tokens out, in {s.seconds:,.1f} s of decoding"),
        (f"{s.requests / s.steps:.1f}", "requests in a step, on average"),
        (f"{1 + verified / s.requests:.2f} of {s.gamma + 1}", "tokens verified per request and step"),
        (f"{s.tokens / s.requests:.2f}", "tokens out per request and step"),
        (_percent((verified - accepted) / verified if verified else None), "of the verified drafts in vain"),
        (_percent(1 - s.drafted_steps / s.steps), "of the steps without a draft"),
        (_percent(s.step_error), "step time predicted wrong by (median)"),
    ]
    if s.reliability.online is not None and s.reliability.raw is not None:
        values.append(
            (
                f"{s.reliability.online.overall:.3f}",
                f"calibration error; the draft's own: {s.reliability.raw.overall:.3f}",
            )
        )
    return [f'<div class="tile"><b>{value}</b><span>{html.escape(text)}</span></div>' for value, text in values]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _figure(chart: Chart) -> str:
    wide = ' class="wide"' if chart.wide else ""
    return (
        f'<figure{wide} id="figure-{chart.name}"><h2>{html.escape(chart.title)}</h2>{chart.svg}'
        f"<figcaption>{html.escape(chart.caption)}</figcaption></figure>"
    )
