"""Reliability curves: how often drafts of a confidence are accepted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sglang_adaptive.benchmarks.calibration_scores import Outcomes, ece, equal_bins

_COLOURS = ("0.45", "tab:red", "tab:blue")
_COLUMNS = 4


def draw(curves: Mapping[str, Mapping[str, Outcomes]], title: str, path: Path) -> None:
    """Write a panel per label, with a curve for each method of ``curves``, as PNG. A point is a bin of equal count."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = list(next(iter(curves.values())))
    rows = -(-len(labels) // _COLUMNS)
    figure, grid = pyplot.subplots(rows, _COLUMNS, figsize=(3.2 * _COLUMNS, 3.1 * rows), dpi=110, squeeze=False)
    for axes in grid.flat[len(labels) :]:
        axes.set_visible(False)
    for label, axes in zip(labels, grid.flat, strict=False):
        axes.plot([0, 1], [0, 1], color="0.8", linewidth=1)
        for (name, by_label), colour in zip(curves.items(), _COLOURS, strict=False):
            if label in by_label:
                of = by_label[label]
                bins = equal_bins(of.predicted)
                x, y = ([float(values[part].mean()) for part in bins] for values in (of.predicted, of.passed))
                text = f"{name}: ECE {ece(of.predicted, of.passed, bins):.3f}"
                axes.plot(x, y, marker="o", markersize=3, linewidth=1.3, color=colour, label=text)
        count = next(by_label[label].predicted.size for by_label in curves.values() if label in by_label)
        axes.set_title(f"{f'position {label}' if label.isdigit() else label}, {count:,} outcomes", fontsize=9)
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axes.legend(fontsize=7, loc="upper left")
        axes.grid(True, alpha=0.25)
    figure.supxlabel("confidence", fontsize=9)
    figure.supylabel("accepted", fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
