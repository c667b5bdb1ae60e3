"""Pictures: co-activation before and after placement, and the trade-off between traffic and balance, ladders. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cap_hf.layout import ExpertLayout
from cap_hf.metrics import jaccard
from cap_hf.trace import RoutingTrace

__all__ = ["plot_coactivation", "plot_lines", "plot_panels", "plot_tradeoff"]

Series = Mapping[str, Sequence[tuple[float, float]]]


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib; install cap_hf[plots]") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_coactivation(trace: RoutingTrace, layouts: Mapping[str, ExpertLayout], path: str | Path, layer: int = 0) -> None:
    """Heat map of one layer's co-activation under each layout, experts ordered by rank, rank borders drawn.

    Args:
        trace: routing that the co-activation is counted on.
        layouts: title -> layout.
        path: picture to write (.png, .svg, .pdf).
        layer: number of the MoE layer, from 0.
    """
    pyplot = _pyplot()
    p = jaccard(trace)[layer]
    figure, axes = pyplot.subplots(1, len(layouts), figsize=(4.6 * len(layouts) + 0.8, 4.6), squeeze=False, layout="constrained")
    for axis, (title, layout) in zip(axes[0], layouts.items(), strict=True):
        ranks = layout.expert_to_rank[layer]
        order = np.argsort(ranks, kind="stable")
        inside = p[ranks[:, None] == ranks[None, :]].sum() / p.sum() if p.sum() else 0.0
        image = axis.imshow(
            p[np.ix_(order, order)], cmap="magma", vmin=0, vmax=float(np.quantile(p, 0.995)) or 1.0, interpolation="nearest"
        )
        for border in np.cumsum(np.bincount(ranks, minlength=layout.num_ranks))[:-1] - 0.5:
            axis.axhline(border, color="white", linewidth=0.6)
            axis.axvline(border, color="white", linewidth=0.6)
        axis.set_title(f"{title}: {inside:.0%} inside ranks", fontsize=10)
        axis.set_xlabel("expert, ordered by rank")
    axes[0][0].set_ylabel(f"expert, MoE layer {trace.layer_ids[layer]} of the model")
    figure.colorbar(image, ax=axes[0].tolist(), label="co-activation p_ij (Jaccard)", shrink=0.85)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def plot_tradeoff(series: Series, path: str | Path, chosen: tuple[float, float] | None = None) -> None:
    """Devices per token against load imbalance; lower left is better.

    Args:
        series: name -> points (devices per token, load imbalance); several points are joined, a spectrum for one.
        path: picture to write.
        chosen: a point to ring.
    """
    labels = ("devices per token (less traffic to the left)", "load imbalance, busiest / mean (1 is perfect)")
    plot_lines(series, path, *labels, ringed=None if chosen is None else ("chosen by measurement", chosen))


def plot_lines(
    series: Series,
    path: str | Path,
    x_label: str,
    y_label: str,
    ringed: tuple[str, tuple[float, float]] | None = None,
) -> None:
    """Lines through points.

    Args:
        series: name -> points (x, y), joined in the order given.
        path: picture to write.
        ringed: name of a point, and the point to ring.
    """
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(6.2, 4.4), layout="constrained")
    _draw(axis, series)
    if ringed is not None:
        ring = dict(marker="o", markersize=15, markerfacecolor="none", markeredgecolor="black", linestyle="none")
        axis.plot(*ringed[1], label=ringed[0], **ring)
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def plot_panels(panels: Mapping[str, Series], path: str | Path, x_label: str, columns: int = 4) -> None:
    """Small pictures of lines beside each other, under one legend.

    Args:
        panels: title -> name -> points (x, y); every panel has the same names.
        path: picture to write.
        x_label: of all panels.
        columns: panels in a row, at most.
    """
    pyplot = _pyplot()
    columns = min(columns, len(panels))
    num_rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(num_rows, columns, figsize=(3.2 * columns, 2.6 * num_rows), squeeze=False, layout="constrained")
    for axis, (title, series) in zip(axes.flat, panels.items(), strict=False):
        _draw(axis, series)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(x_label, fontsize=8)
        axis.tick_params(labelsize=8)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw(axis: Any, series: Series) -> None:
    for (name, points), marker in zip(series.items(), "osD^vP*X<>" * len(series), strict=False):
        x, y = zip(*points, strict=True)
        axis.plot(x, y, marker=marker, linewidth=1.0, markersize=6, label=name)
    axis.grid(alpha=0.3)
