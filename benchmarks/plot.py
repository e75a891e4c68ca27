"""The Pareto picture: throughput against interactivity, one line per arm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

STYLE = {
    "none": {"color": "0.45", "linestyle": "--", "linewidth": 1.4},
    "fixed": {"linestyle": "-", "linewidth": 1.1, "alpha": 0.9},
    "compact": {"color": "tab:purple", "linestyle": "-.", "linewidth": 1.4},
    "ours": {"color": "tab:red", "linestyle": "-", "linewidth": 2.6},
    "other": {"linestyle": ":", "linewidth": 1.2},
}


def draw(points: dict[str, list[dict[str, float]]], roles: dict[str, str], title: str, path: Path) -> None:
    """Write the picture of ``compare.pareto``'s points as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5), dpi=130)
    blues = iter(pyplot.get_cmap("Blues")([0.4, 0.55, 0.7, 0.85, 0.95] * 4))
    for arm, line in points.items():
        style: dict[str, Any] = dict(STYLE[roles[arm]])
        if roles[arm] == "fixed":
            style["color"] = next(blues)
        x, y = ([point[name] for point in line] for name in ("tok_s_user", "tok_s"))
        axes.plot(x, y, marker="o", markersize=4, label=arm, zorder=3 if roles[arm] == "ours" else 2, **style)
        if roles[arm] == "ours":
            for point in line:
                place = (point["tok_s_user"], point["tok_s"])
                axes.annotate(f"c={point['concurrency']}", place, (5, 5), textcoords="offset points", fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="interactivity: tokens/s per user", ylabel="throughput: tokens/s")
    axes.set_title(title)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
