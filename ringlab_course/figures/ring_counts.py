"""A matrix of how often a ring program counts each key for each query, measured with special inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.viz.style import INK, PAPER, QUIET, RED, new_figure, styled
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ringlab.layout import Layout

ONCE = "#c3c3c3"
"""The grey of a key that is counted once: 0.35 on matplotlib's map of greys."""


def counts(program: Callable[..., Any], layout: Layout, *args: Any) -> np.ndarray:
    """Return how often `program` counts each key for each query, measured: float64 (S, S) [query, key].

    `program(ring, q, k, v, *args)` runs on virtual ranks and returns out and lse. With q = k = 0, every
    visible key has the weight e⁰ = 1. With the identity matrix as v, out·e^lse is the number of times that
    each key was counted.
    """
    import torch

    from ringlab.comm.virtual.cluster import VirtualCluster

    zeros = torch.zeros(1, 1, layout.S, layout.S, dtype=torch.float64)
    probes = zeros, zeros, torch.eye(layout.S, dtype=torch.float64)[None, None]

    def measured(ring: Any) -> tuple[Any, Any]:
        out, lse = program(ring, *layout.shard(probes, ring.rank), *args)
        return out, lse[..., None]

    out, lse = layout.unshard(VirtualCluster(layout.P).run(measured).results)
    return (out * lse.exp())[0, 0].numpy()


def counted(counts: np.ndarray, boundaries: Sequence[int] = (), title: str = "") -> Figure:
    """Return a measured (query, key) count matrix as a figure; see `draw_counts`."""
    with styled():
        figure = new_figure((5.2, 4.6))
        ax = figure.subplots()
        draw_counts(ax, counts, boundaries)
        ax.set_title(title, fontsize=10.5)
        _counts_legend(figure, counts, bool(boundaries))
    return figure


def compared(panels: Mapping[str, np.ndarray], boundaries: Sequence[int] = (), title: str = "") -> Figure:
    """Return a picture of measured count matrices side by side, each under its name; see `draw_counts`."""
    with styled():
        figure = new_figure((4.2 * len(panels), 5.1))
        figure.set_layout_engine("constrained", h_pad=0.1)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for ax, (name, counts) in zip(axes, panels.items(), strict=True):
            draw_counts(ax, counts, boundaries)
            ax.set_title(name, fontsize=10.5)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11.5)
        _counts_legend(figure, np.stack(list(panels.values())), bool(boundaries))
    return figure


def _counts_legend(figure: Figure, counts: np.ndarray, bounded: bool) -> None:
    from matplotlib.lines import Line2D

    handles: list[Any] = [
        panel.patch(facecolor=ONCE, edgecolor=QUIET, label="counted once"),
        panel.patch(facecolor=PAPER, edgecolor=QUIET, label="never counted"),
    ]
    often = sorted({f"{count:.2g}" for count in counts[counts > 1.5]})
    handles += [
        Line2D([], [], linestyle="", marker=f"${count}$", color=RED, label=f"counted {count} times")
        for count in often
    ]
    if bounded:
        handles.append(Line2D([], [], color=INK, linewidth=0.8, label="a new rank's tokens begin"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8.5)


def draw_counts(ax: Axes, counts: np.ndarray, boundaries: Sequence[int] = ()) -> None:
    """Draw how often each key was counted for each query: white for never, grey for once, else a number.

    boundaries: the positions where the tokens of another owner begin; lines are drawn there.
    """
    once = np.isclose(counts, 1.0, atol=1e-6)
    ax.imshow(np.where(once, 0.35, 0.0), cmap="Greys", vmin=0, vmax=1)
    for query, key in np.argwhere(~once & ~np.isclose(counts, 0.0, atol=1e-6)):
        ax.text(key, query, f"{counts[query, key]:.2g}", ha="center", va="center", fontsize=8, color=RED)
    for place in boundaries:
        ax.axhline(place - 0.5, color=INK, linewidth=0.8)
        ax.axvline(place - 0.5, color=INK, linewidth=0.8)
    ax.grid(False)
    ax.set_xlabel("key (global position, tokens)")
    ax.set_ylabel("query (global position, tokens)")
