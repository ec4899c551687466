"""Draws measurements: how latencies are distributed, and the rate of output. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from allspark.bench.metrics import LATENCIES, latencies
from allspark.bench.report import Measurement

_INSTALL = "--plot needs matplotlib: pip install matplotlib"


def check_plot(path: Path) -> None:
    """Raises RuntimeError without matplotlib, ValueError for a file that it cannot write."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(f"{_INSTALL} ({error})") from None
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(f"--plot is {str(path)!r}; its ending must be one of {', '.join(kinds)}")


def draw(path: Path, title: str, measurements: Sequence[Measurement]) -> None:
    """Writes a picture, of the kind that the file's ending names. Requires: check_plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(12, 8), layout="constrained")
    grid: Any = figure.add_gridspec(2, 3)
    values = [latencies(each.outcomes) for each in measurements]
    for index, (name, shown) in enumerate(LATENCIES.items()):
        panel = figure.add_subplot(grid[index // 2, index % 2])
        for each, found in zip(measurements, values, strict=True):
            shares = np.arange(1, len(found[name]) + 1) / max(1, len(found[name]))
            panel.step(sorted(found[name]), shares, where="post", label=each.title)
        panel.set(title=f"{shown}, ms", ylabel="part of the values", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    handles, labels = panel.get_legend_handles_labels()
    panel = figure.add_subplot(grid[:, 2])
    rates = [each.values["output_tok_s"] or 0 for each in measurements]
    colors = [f"C{index % 10}" for index in range(len(rates))]  # those of the lines
    panel.bar_label(panel.bar(range(len(rates)), rates, color=colors), fmt="%.1f")
    panel.set(title="output tokens/s", xticks=[])
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    figure.suptitle(title)
    try:
        figure.savefig(path)
    finally:
        pyplot.close(figure)
