"""Strong and weak scaling of causal attention in a ring: the work of a rank, and how a hop compares with a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ringlab.viz.style import BLUE, RED, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[float]]
"""Values by number of ranks, for each way of scaling."""


def figure(ranks: Sequence[int], work: Curves, hop: Curves) -> Figure:
    """Return two panels: the work of one rank, and the time of a hop in blocks, against the number of ranks.

    work: the pairs of a rank, relative to those of one process. hop: the seconds of a hop, relative to those at
    the length of one process. A rank alone has no hop.
    """
    with styled():
        drawn = new_figure((8.0, 3.3))
        left, right = drawn.subplots(1, 2)
        ratios = {name: _ratios(ranks, work[name], hop[name]) for name in work}
        for ax, curves, begin in ((left, work, 0), (right, ratios, 1)):
            for (name, values), colour, marker in zip(curves.items(), (BLUE, RED), "os", strict=True):
                ax.plot(ranks[begin:], values[begin:], color=colour, marker=marker, label=name)
            ax.set_xscale("log", base=2)
            ax.set_yscale("log", base=2)
            ax.set_xticks(ranks, map(str, ranks))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.set(xlabel="ranks P", xlim=(ranks[0] * 0.9, ranks[-1] * 1.1))
        left.set(title="Work of one rank", ylabel="one process = 1")
        right.set(
            title="Time of a hop over that of a block",
            ylabel="hop / block, in units of\nthat at 8,192 tokens per rank",
        )
        drawn.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return drawn


def describe(ranks: Sequence[int], work: Curves, hop: Curves) -> str:
    """Return the picture in words."""
    told = []
    for name in work:
        ratios = _ratios(ranks, work[name], hop[name])
        told.append(
            f"{name}: from {ranks[0]} to {ranks[-1]} ranks the work of a rank goes from {work[name][0]:g} to "
            f"{work[name][-1]:.2g}, and a hop beside a block is {ratios[1]:.2g} on {ranks[1]} ranks and {ratios[-1]:.2g} on {ranks[-1]}"
        )
    return f"{'; '.join(told)}."


def _ratios(ranks: Sequence[int], work: Sequence[float], hop: Sequence[float]) -> list[float]:
    """Return the time of a hop over that of a block: a rank has as many blocks as there are ranks."""
    return [one * P / pairs for P, pairs, one in zip(ranks, work, hop, strict=True)]
