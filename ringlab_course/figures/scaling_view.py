"""Strong and weak scaling of causal attention in a ring: the work of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ringlab.viz.style import BLUE, RED, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[float]]
"""Values by number of ranks, for each way of scaling."""


def figure(ranks: Sequence[int], work: Curves) -> Figure:
    """Return the work of one rank against the number of ranks, for two ways of scaling.

    work: the pairs of a rank, relative to those of one process.
    """
    from matplotlib.ticker import LogLocator

    with styled():
        drawn = new_figure((8.0, 3.3))
        ax = drawn.subplots()
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        for (name, values), colour, marker in zip(work.items(), (BLUE, RED), "os", strict=True):
            ax.plot(ranks, values, color=colour, marker=marker)
            ax.annotate(
                f"{name}:\n{_fraction(values[-1])}{' times' if values[-1] > 1 else ' of'} the work",
                (ranks[-1], values[-1]),
                (10, 0),
                textcoords="offset points",
                va="center",
                color=colour,
                annotation_clip=False,
            )
        ax.set_xticks(ranks, map(str, ranks))
        ax.yaxis.set_major_locator(LogLocator(base=4))
        ax.yaxis.set_major_formatter(lambda value, _: _fraction(value))
        ax.set(
            xlabel="ranks P",
            ylabel="work of one rank\n(one process = 1)",
            xlim=(ranks[0] * 0.9, ranks[-1] * 1.1),
        )
        ax.set_title("Equal tokens per rank: twice the ranks, twice the work of each")
        ax.margins(y=0.15)
    return drawn


def _fraction(value: float) -> str:
    return f"{value:.3g}" if value >= 1 else f"1/{1 / value:.3g}"


def describe(ranks: Sequence[int], work: Curves) -> str:
    """Return the picture in words."""
    told = [
        f"{name}: from {ranks[0]} to {ranks[-1]} ranks the work of a rank goes from {values[0]:g} to {values[-1]:.2g}"
        for name, values in work.items()
    ]
    return f"{'; '.join(told)}."
