"""Draws a run of compare.py: one panel per workload and shape, one bar per engine."""

from __future__ import annotations

from pathlib import Path

from record import Record
from report import FIGURES, Result, shown_figures

_OURS, _PEER = "#c0392b", "#8aa1b4"


def panels(result: Result) -> list[tuple[str, list[tuple[str, float]]]]:
    """Titles, and the engines with their medians of a workload's main figure."""
    drawn = []
    for shape in result.shapes:
        for workload in result.workloads:
            name = shown_figures(workload)[0]
            bars = [
                (label, value)
                for label in result.record["contestants"][shape]
                if (value := result.median(shape, label, f"{workload}.{name}")) is not None
            ]
            if bars:
                drawn.append((f"{shape}, {workload}: {FIGURES[name].title}", bars))
    return drawn


def draw(record: Record, path: Path) -> None:
    """Needs matplotlib; raises ImportError without it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = panels(Result(record))
    if not drawn:
        return
    columns = min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    height = 0.9 + 0.28 * max(len(bars) for _, bars in drawn)
    size = (5 * columns, height * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(drawn) :]:
        axis.axis("off")
    for axis, (title, bars) in zip(axes.flat, drawn, strict=False):
        labels, values = zip(*bars, strict=True)
        colours = [_OURS if label in record["ours"] else _PEER for label in labels]
        shapes = axis.barh(labels, values, color=colours)
        axis.bar_label(shapes, fmt="{:,.0f}", padding=2, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.tick_params(labelsize=8)
        axis.set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
