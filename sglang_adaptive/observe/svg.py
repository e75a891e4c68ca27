"""A small plotter: axes, lines, bands, bars and dots as SVG text. Everything that is text is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_INK, _GRID, _FAINT = "#1f2933", "#e4e7eb", "#616e7c"
_RIGHT, _TOP, _BOTTOM = 26, 12, 44
_CHARACTER = 6.6  # mean width of a character at 12 px


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def label(value: float) -> str:
    """A tick's number, short."""
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:,.4f}".rstrip("0").rstrip(".")


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers within [low, high], at most about ``most``."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(step * nice for nice in (1, 2, 2.5, 5, 10, 20) if (high - low) / (step * nice) <= most)
    return [round(step * k, 12) for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log2_ticks(low: float, high: float) -> list[float]:
    """Powers of two within [low, high], thinned to at most eight."""
    exponents = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
    return [2.0**e for e in exponents[:: max(1, math.ceil(len(exponents) / 8))]]


@dataclass
class Axis:
    """A scale. ``low`` < ``high``; both above 0 where it is logarithmic (base 2)."""

    low: float
    high: float
    name: str
    log: bool = False
    named: Sequence[tuple[float, str]] | None = None
    percent: bool = False

    def share(self, value: np.ndarray | float) -> np.ndarray:
        """0 at ``low``, 1 at ``high``; limited to what is drawn."""
        at = np.asarray(value, np.float64)
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                at = np.log2(at)
            low, high = math.log2(self.low), math.log2(self.high)
        else:
            low, high = self.low, self.high
        return np.clip((at - low) / (high - low), -0.02, 1.02)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        if self.named is not None:
            return list(self.named)
        values = log2_ticks(self.low, self.high) if self.log else ticks(self.low, self.high, most)
        return [(value, f"{value * 100:.0f} %" if self.percent else label(value)) for value in values]


def span(*values: np.ndarray, zero: bool = False, log: bool = False) -> tuple[float, float]:
    """Ends of an axis that holds all finite ``values``, with a little room; from 0 where ``zero``."""
    joined = np.concatenate([np.ravel(np.asarray(each, np.float64)) for each in values])
    known = joined[np.isfinite(joined) & ((joined > 0) | (not log))]
    if not known.size:
        return (1.0, 2.0) if log else (0.0, 1.0)
    low, high = float(known.min()), float(known.max())
    if log:
        return low / 1.1, high * 1.1 + (low == high)
    if zero:
        low = min(low, 0.0)
    room = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
    return (low if zero and low == 0.0 else low - room), high + room


@dataclass
class Plot:
    """One chart. ``name`` becomes the id ``chart-NAME``; marks are drawn in the order in which they are added.
    ``margin`` is the least room on the left, so that charts can stand in line."""

    name: str
    title: str
    x: Axis
    y: Axis
    width: int = 540
    height: int = 300
    margin: float = 0.0
    _marks: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str, str]] = field(default_factory=list)

    def line(self, x: np.ndarray, y: np.ndarray, colour: str, name: str = "", dash: str = "", width: float = 2) -> None:
        """A line, interrupted where a value is missing."""
        px, py = self._px(x), self._py(y)
        path, pen = [], "M"
        for a, b in zip(px, py, strict=True):
            if np.isfinite(a) and np.isfinite(b):
                path.append(f"{pen}{_n(a)} {_n(b)}")
                pen = "L"
            else:
                pen = "M"
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._marks.append(
            f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed} '
            'stroke-linejoin="round" stroke-linecap="round"/>'
        )
        self._note(name, colour, "dash" if dash else "line")

    def area(
        self, x: np.ndarray, low: np.ndarray, high: np.ndarray, colour: str, name: str = "", ink: float = 1
    ) -> None:
        """The band between two lines; values that are missing are left out."""
        known = np.isfinite(low) & np.isfinite(high)
        px, top, bottom = self._px(x)[known], self._py(high)[known], self._py(low)[known]
        points = [*zip(px, top, strict=True), *zip(px[::-1], bottom[::-1], strict=True)]
        if points:
            text = " ".join(f"{_n(a)},{_n(b)}" for a, b in points)
            self._marks.append(f'<polygon points="{text}" fill="{colour}" fill-opacity="{ink}"/>')
        self._note(name, colour, "box")

    def bar(self, x: float, width: float, low: float, high: float, colour: str, tip: str = "") -> None:
        """A bar around ``x``, in units of the axes, from ``low`` to ``high``."""
        left, right = self._px(np.array([x - width / 2, x + width / 2]))
        top, bottom = self._py(np.array([high, low]))
        self._marks.append(
            f'<rect x="{_n(left)}" y="{_n(top)}" width="{_n(right - left)}" height="{_n(bottom - top)}" '
            f'fill="{colour}">{_tip(tip)}</rect>'
        )

    def dots(
        self,
        x: np.ndarray,
        y: np.ndarray,
        colour: str,
        name: str = "",
        radius: np.ndarray | float = 3.5,
        tips: Sequence[str] = (),
        hollow: bool = False,
    ) -> None:
        """Discs; ``radius`` in pixels, one or one each."""
        radii = np.broadcast_to(np.asarray(radius, np.float64), np.shape(x))
        fill = f'fill="#fff" stroke="{colour}" stroke-width="1.8"' if hollow else f'fill="{colour}" fill-opacity="0.85"'
        for index, (a, b, r) in enumerate(zip(self._px(x), self._py(y), radii, strict=True)):
            if np.isfinite(a) and np.isfinite(b):
                tip = _tip(tips[index]) if tips else ""
                self._marks.append(f'<circle cx="{_n(a)}" cy="{_n(b)}" r="{_n(r)}" {fill}>{tip}</circle>')
        self._note(name, colour, "ring" if hollow else "dot")

    def whiskers(self, x: np.ndarray, low: np.ndarray, high: np.ndarray, colour: str) -> None:
        """Thin vertical lines from ``low`` to ``high``."""
        for a, b, c in zip(self._px(x), self._py(low), self._py(high), strict=True):
            if np.isfinite(a + b + c):
                self._marks.append(f'<path d="M{_n(a)} {_n(b)}V{_n(c)}" stroke="{colour}" stroke-opacity="0.55"/>')

    def text(self, x: float, y: float, text: str, colour: str = _FAINT, dx: float = 6, dy: float = -6) -> None:
        """Text beside a point, kept inside the picture."""
        a, b = float(self._px(np.array([x]))[0]) + dx, float(self._py(np.array([y]))[0]) + dy
        if np.isfinite(a + b):
            a = min(a, self.width - _RIGHT - _CHARACTER * len(text))
            self._marks.append(
                f'<text x="{_n(a)}" y="{_n(max(b, _TOP + 10))}" fill="{colour}" class="s">{html.escape(text)}</text>'
            )

    def legend(self, name: str, colour: str) -> None:
        """An entry for marks that have none of their own, such as bars."""
        self._note(name, colour, "box")

    def svg(self) -> str:
        """The picture."""
        rows, top = self._legend_rows()
        offset = 18 * top
        body = [*self._axes(), f"<g>{''.join(self._marks)}</g>"]
        return (
            f'<svg id="chart-{self.name}" class="chart" role="img" aria-label="{html.escape(self.title)}" '
            f'viewBox="0 0 {self.width} {self.height + offset}" xmlns="http://www.w3.org/2000/svg">'
            f'{rows}<g transform="translate(0 {offset})">{"".join(body)}</g></svg>'
        )

    @property
    def _left(self) -> float:
        """Room for the longest label of the vertical axis and for the axis's name."""
        return max(self.margin, 32 + _CHARACTER * max((len(text) for _, text in self._y_ticks()), default=1))

    def _y_ticks(self) -> list[tuple[float, str]]:
        return self.y.ticks(max(2, (self.height - _TOP - _BOTTOM) // 42))

    def _px(self, x: np.ndarray | Sequence[float]) -> np.ndarray:
        return self._left + self.x.share(np.asarray(x)) * (self.width - self._left - _RIGHT)

    def _py(self, y: np.ndarray | Sequence[float]) -> np.ndarray:
        return self.height - _BOTTOM - self.y.share(np.asarray(y)) * (self.height - _TOP - _BOTTOM)

    def _axes(self) -> list[str]:
        left, right, top, bottom = self._left, self.width - _RIGHT, _TOP, self.height - _BOTTOM
        out = []
        for value, text in self._y_ticks():
            y = _n(float(self._py([value])[0]))
            out.append(f'<line x1="{_n(left)}" x2="{right}" y1="{y}" y2="{y}" stroke="{_GRID}"/>')
            out.append(f'<text x="{_n(left - 6)}" y="{y}" dy="4" text-anchor="end">{html.escape(text)}</text>')
        for value, text in self.x.ticks(max(2, int(right - left) // 70)):
            x = _n(float(self._px([value])[0]))
            out.append(f'<line x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}" stroke="{_FAINT}"/>')
            out.append(f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{html.escape(text)}</text>')
        out.append(f'<path d="M{_n(left)} {top}V{bottom}H{right}" fill="none" stroke="{_FAINT}"/>')
        middle = (left + right) / 2
        out.append(
            f'<text x="{_n(middle)}" y="{bottom + 36}" text-anchor="middle" class="a">{html.escape(self.x.name)}</text>'
        )
        middle = (top + bottom) / 2
        out.append(
            f'<text transform="translate(14 {_n(middle)}) rotate(-90)" text-anchor="middle" class="a">'
            f"{html.escape(self.y.name)}</text>"
        )
        return out

    def _note(self, name: str, colour: str, kind: str) -> None:
        if name:
            self._legend.append((name, colour, kind))

    def _legend_rows(self) -> tuple[str, int]:
        out, x, row = [], self._left, 0
        for name, colour, kind in self._legend:
            width = 26 + _CHARACTER * len(name) + 14
            if x + width > self.width and x > self._left:
                x, row = self._left, row + 1
            y = 12 + 18 * row
            out.append(_swatch(kind, colour, x, y))
            out.append(f'<text x="{_n(x + 24)}" y="{y}" dy="4">{html.escape(name)}</text>')
            x += width
        return "".join(out), row + 1 if self._legend else 0


def _swatch(kind: str, colour: str, x: float, y: float) -> str:
    if kind in ("line", "dash"):
        dash = ' stroke-dasharray="5 3"' if kind == "dash" else ""
        return f'<path d="M{_n(x)} {y}h18" stroke="{colour}" stroke-width="2.5"{dash}/>'
    if kind == "dot":
        return f'<circle cx="{_n(x + 9)}" cy="{y}" r="4" fill="{colour}"/>'
    if kind == "ring":
        return f'<circle cx="{_n(x + 9)}" cy="{y}" r="4" fill="#fff" stroke="{colour}" stroke-width="1.8"/>'
    return f'<rect x="{_n(x + 2)}" y="{y - 6}" width="14" height="12" fill="{colour}"/>'


def _tip(text: str) -> str:
    return f"<title>{html.escape(text)}</title>" if text else ""
