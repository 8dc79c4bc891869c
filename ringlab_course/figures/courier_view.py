"""The couriers of a backward ring as a picture: ranks down, steps across, and what each sum holds by then.

What is drawn comes from `ringlab_course.figures.courier_frames`, hence from the messages of a real run. Colours
tell the contributors apart and are doubled by place; the number says whose block was added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.viz.frontend import show_player, step_player
from ringlab.viz.picture import as_html
from ringlab.viz.style import BLUE, GREEN, INK, PAPER, QUIET, RED, RULE, new_figure, rank_colour, styled
from ringlab_course.figures.courier_frames import Frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DARK = {BLUE, RED, GREEN}
"""Fills on which white text reads better."""
WIDTH, HEIGHT = 0.66, 0.34
"""Of a courier's box, where columns and rows are 1 apart."""


def figure(frames: Sequence[Frame], title: str = "", upto: int | None = None) -> Figure:
    """Return the whole run; `upto` leaves later frames pale."""
    P = len(frames[0].held)
    with styled():
        drawn = new_figure((1.45 * len(frames) + 0.7, 0.86 * P + 0.9))
        ax = drawn.subplots()
        for place, frame in enumerate(frames):
            pale = upto is not None and place > upto
            _draw_column(ax, place, frame, pale, current=place == upto)
        _draw_axes(ax, frames, title)
    return drawn


def describe(frames: Sequence[Frame]) -> str:
    """Return the whole run in words: the alternative text of `figure`."""
    return " ".join(frame.describe() for frame in frames)


def player(frames: Sequence[Frame], title: str = "") -> Any:
    """Return a widget that plays the run: Play, a slider (arrow keys move it), the picture and its words."""
    pictures = [as_html(figure(frames, title, n), frame.describe()) for n, frame in enumerate(frames)]
    return step_player(pictures, "step")


def play(frames: Sequence[Frame], title: str = "") -> None:
    """Show the player to a person; where nobody is there to press Play, say so and leave it to `figure`."""
    still = f"steps 0 to {len(frames) - 1}: run this cell to play them; they stand side by side below"
    show_player(lambda: player(frames, title), lambda: print(still))


def astray(frame: Frame, rank: int) -> bool:
    """Return whether the sum on `rank` is none of one block: it holds others, one twice, or is not this rank's in the end."""
    sums = frame.sums[rank]
    if sums is None:
        return frame.home
    owners = np.flatnonzero(sums.any(axis=0))
    strange = frame.home and not np.array_equal(owners, [rank])
    return bool(len(owners) > 1 or (sums > 1).any() or strange)


def _draw_column(ax: Axes, place: int, frame: Frame, pale: bool, current: bool) -> None:
    for rank, sums in enumerate(frame.sums):
        alpha = 0.15 if pale else 1.0
        if frame.held[rank] is not None:
            ax.text(
                place,
                rank - 0.32,
                f"K/V {frame.held[rank]} here",
                ha="center",
                fontsize=7.5,
                color=QUIET,
                alpha=alpha,
            )
        if sums is not None:
            _draw_courier(ax, place, rank, frame, alpha, current)
        if sums is not None and frame.to[rank] is not None:
            _draw_hop(ax, place, rank, frame, alpha)


def _draw_courier(ax: Axes, place: int, rank: int, frame: Frame, alpha: float, current: bool) -> None:
    """A box with one place for each contributor, and in it the owner of the block that it added of."""
    from matplotlib.patches import Rectangle

    sums, wrong = frame.sums[rank], astray(frame, rank)
    assert sums is not None
    P = len(sums)
    left, width = place - WIDTH / 2, WIDTH / P
    for contributor in range(P):
        owners = [
            str(owner) for owner in np.flatnonzero(sums[contributor]) for _ in range(sums[contributor, owner])
        ]
        fill = rank_colour(contributor) if owners else PAPER
        corner = left + contributor * width, rank - HEIGHT / 2
        ax.add_patch(
            Rectangle(corner, width, HEIGHT, facecolor=fill, edgecolor=RULE, linewidth=0.6, alpha=alpha)
        )
        colour = PAPER if fill in DARK else INK
        size = 8.5 if len(owners) < 2 else 6
        ax.text(
            corner[0] + width / 2,
            rank,
            ",".join(owners[:3]),
            ha="center",
            va="center",
            fontsize=size,
            color=colour,
            alpha=alpha,
        )
    edge, heavy = (RED if wrong else INK), 2.2 if wrong or current else 1.0
    outline = Rectangle(
        (left, rank - HEIGHT / 2), WIDTH, HEIGHT, fill=False, edgecolor=edge, linewidth=heavy, alpha=alpha
    )
    if wrong:
        outline.set_linestyle((0, (3, 1.5)))
    ax.add_patch(outline)


def _draw_hop(ax: Axes, place: int, rank: int, frame: Frame, alpha: float) -> None:
    """An arrow to the next column; one that goes round the end leaves and enters at the edges."""
    to, P = frame.to[rank], len(frame.held)
    assert to is not None
    step = 1 if to == (rank + 1) % P else -1
    style = {
        "arrowstyle": "-|>,head_width=0.2,head_length=0.4",
        "color": QUIET,
        "linewidth": 1.1,
        "alpha": alpha,
    }
    start, end = (place + WIDTH / 2, rank), (place + 1 - WIDTH / 2, to)
    if abs(to - rank) == 1:
        ax.annotate("", xy=end, xytext=start, arrowprops=style)
        return
    middle = place + 0.5
    ax.plot([start[0], middle], [rank, rank + step * 0.55], color=QUIET, linewidth=1.1, alpha=alpha)
    ax.annotate("", xy=end, xytext=(middle, to - step * 0.55), arrowprops=style)


def _draw_axes(ax: Axes, frames: Sequence[Frame], title: str) -> None:
    from matplotlib.patches import Patch

    P = len(frames[0].held)
    names = ["returned" if frame.home else f"step {frame.step}" for frame in frames]
    ax.set_xticks(range(len(frames)), names, fontsize=9)
    ax.set_yticks(range(P), [f"rank {rank}" for rank in range(P)], fontsize=9)
    ax.set(xlim=(-0.5, len(frames) - 0.5), ylim=(P - 0.35, -0.65))
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_title(title)
    keys = [Patch(facecolor=rank_colour(rank), label=f"added by rank {rank}") for rank in range(P)]
    ax.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=min(P, 4), fontsize=8.5)
