"""Who holds what in exchanges other than a ring's hop: an all-to-all, the four schedules, one step of decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.viz.style import HATCHES, INK, PAPER, PURPLE, QUIET, RULE, new_figure, rank_colour, styled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P, TOKENS = 4, 16
"""Ranks, and heads as many; the tokens of the sequence. Rank 1 is the one that is followed."""
OWN, FIRST, LATER = 1, 2, 3
LOOKS: dict[int, tuple[str, dict[str, Any]]] = {
    OWN: ("tokens and heads that rank 1 computes", {"color": rank_colour(1), "hatch": HATCHES[1]}),
    FIRST: ("other keys that come first", {"color": PURPLE, "hatch": ".."}),
    LATER: ("other keys that come later", {"color": RULE}),
}


def holders() -> dict[str, np.ndarray]:
    """Return which rank holds each (head, stretch of tokens) before and after the all-to-all: int64 (P, P)."""
    ranks = np.arange(P)
    return {
        "before: some tokens of all heads": np.tile(ranks, (P, 1)),
        "after: all tokens of some heads": np.tile(ranks[:, None], (1, P)),
    }


def trade() -> Figure:
    """Return two grids, heads by tokens, in the colour of the rank that holds each piece; one piece is followed."""
    with styled():
        figure = new_figure((8.0, 3.0))
        axes = figure.subplots(1, 2, sharey=True)
        for ax, (name, grid) in zip(axes, holders().items(), strict=True):
            for (head, stretch), rank in np.ndenumerate(grid):
                _piece(ax, head, stretch, int(rank))
            ax.set(title=name, xlabel="tokens", xlim=(0, TOKENS), ylim=(-0.5, P - 0.5))
            ax.set(xticks=range(0, TOKENS + 1, TOKENS // P), yticks=range(P))
            ax.grid(visible=False)
        axes[0].set_ylabel("heads")
        figure.suptitle(
            "An all-to-all trades tokens for heads: the number is the rank that holds a piece", fontsize=11
        )
        figure.supxlabel("thick frame: the piece that rank 1 sends to rank 2", fontsize=9, color=INK)
    return figure


def describe_trade() -> str:
    """The picture of `trade` in words."""
    return (
        f"{P} heads by {TOKENS} tokens on {P} ranks, before and after an all-to-all. Before it, each rank holds {TOKENS // P} "
        "neighbouring tokens of all heads: four columns, rank 0 to 3. After it, each rank holds all tokens of one head: "
        "four rows, rank 0 to 3. The piece of head 2 that rank 1 holds before is rank 2's afterwards."
    )


def _piece(ax: Axes, head: int, stretch: int, rank: int) -> None:
    from matplotlib.patches import Rectangle

    width = TOKENS // P
    box: Any = (stretch * width + 0.1, head - 0.45), width - 0.2, 0.9
    ax.add_patch(
        Rectangle(*box, facecolor=rank_colour(rank), edgecolor=PAPER, hatch=HATCHES[rank], linewidth=0)
    )
    if (head, stretch) == (2, 1):
        ax.add_patch(Rectangle(*box, facecolor="none", edgecolor=INK, linewidth=3))
    look: dict[str, Any] = {"boxstyle": "round,pad=0.15", "facecolor": PAPER, "edgecolor": "none"}
    at = (stretch + 0.5) * width, head
    ax.text(*at, str(rank), ha="center", va="center_baseline", fontsize=9, color=INK, bbox=look)


def panels() -> dict[str, np.ndarray]:
    """Return what rank 1 computes and whose keys it needs, by schedule: OWN, FIRST, LATER or 0, int64 (heads, tokens)."""
    every = range(P)
    return {
        "ring": _held(every, range(4, 8), range(4), range(8, 16)),
        "all-gather": _held(every, range(4, 8), range(16)),
        "Ulysses": _held([1], range(16)),
        "hybrid, U = 2": _held([2, 3], range(8), range(8, 16)),
    }


def _held(
    heads: Sequence[int], own: Sequence[int], first: Sequence[int] = (), later: Sequence[int] = ()
) -> np.ndarray:
    grid = np.zeros((P, TOKENS), np.int64)
    for kind, tokens in ((LATER, later), (FIRST, first), (OWN, own)):
        grid[np.ix_(heads, list(tokens))] = kind
    return grid


def schedules() -> Figure:
    """Return a panel for each schedule: what rank 1 of 4 works on, heads by tokens."""
    with styled():
        figure = new_figure((8.0, 2.9))
        for ax, (name, grid) in zip(figure.subplots(1, P, sharey=True), panels().items(), strict=True):
            for kind, (label, look) in LOOKS.items():
                heads, tokens = np.nonzero(grid == kind)
                kwargs = {"align": "edge", "edgecolor": "white", "linewidth": 0, **look}
                ax.bar(tokens, 0.9, 1.0, heads - 0.45, label=label, **kwargs)
            ax.set(title=name, xlim=(0, TOKENS), xticks=range(0, 17, 4), yticks=range(P), xlabel="tokens")
        for column, at, share in ((2, 2.5, "12 of these 16"), (3, 0.5, "4 of these 8")):
            note = f"{share} tokens came\nin the all-to-all"
            centred: Any = {"ha": "center", "va": "center", "fontsize": 8, "backgroundcolor": "white"}
            figure.axes[column].text(8, at, note, **centred)
        figure.axes[0].set_ylabel("heads")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8.5)
        figure.suptitle("What rank 1 of 4 works on, by schedule", fontsize=11)
    return figure


def describe_schedules() -> str:
    """The picture of `schedules` in words."""
    return (
        "What rank 1 of 4 works on, heads against tokens, by schedule. Ring: the queries of its 4 tokens in all 4 heads; keys "
        "of 4 other tokens come first, those of the remaining 8 later. All-gather: the same queries, and all 12 other keys at "
        "once. Ulysses: all 16 tokens in one head, 12 of them from the all-to-all. Hybrid with rows of 2: the 8 tokens of its "
        "row in 2 heads, 4 from the all-to-all, and the keys of the other row's 8 tokens in these heads."
    )


HEADINGS = {0.5: "on all ranks", 2.65: "stays where it is", 5.05: "travels", 7.1: "on all ranks"}
"""What happens to each column of `decode_step`, by where it stands."""


def decode_step(lengths: Sequence[int]) -> Figure:
    """Return one step of decode: the query on every rank, `lengths` cached keys on each, partial results, one merge."""
    middle = (len(lengths) - 1) / 2
    with styled():
        figure = new_figure((8.0, 0.62 * len(lengths) + 1.0))
        ax = figure.subplots()
        for rank, length in enumerate(lengths):
            ax.text(-0.1, rank, f"rank {rank}", ha="right", va="center", fontsize=9.5)
            _box(ax, 0.15, 0.7, rank, "query")
            _arrow(ax, (0.9, rank), (1.3, rank))
            _cache(ax, rank, length, length / max(lengths))
            _arrow(ax, (4.0, rank), (4.4, rank))
            _box(ax, 4.45, 1.2, rank, "out, lse")
            _arrow(ax, (5.7, rank), (6.35, middle + 0.25 * (rank - middle)))
        _box(ax, 6.4, 1.4, middle, "merged out", height=1.1)
        for left, words in HEADINGS.items():
            ax.text(left, -0.75, words, ha="center", va="center", fontsize=9, color=QUIET)
        ax.set(xlim=(-0.85, 7.9), ylim=(len(lengths) - 0.5, -1.0))
        ax.set_axis_off()
        ax.set_title("One new token: its query meets a cache that is sharded over ranks", fontsize=11)
    return figure


def describe_decode_step(lengths: Sequence[int]) -> str:
    """The picture of `decode_step` in words."""
    keys = ", ".join(map(str, lengths))
    return (
        f"One step of decode on {len(lengths)} ranks. Every rank has the query of the new token. It meets the keys and values "
        f"that the rank has cached ({keys}), which stay where they are. Each rank gets a partial out and its lse; these travel "
        "to all ranks, and every rank merges them into one out."
    )


def _cache(ax: Axes, rank: int, length: int, share: float) -> None:
    from matplotlib.patches import Rectangle

    look: Any = {"facecolor": rank_colour(rank), "edgecolor": PAPER, "hatch": HATCHES[rank % len(HATCHES)]}
    ax.add_patch(Rectangle((1.35, rank - 0.32), 2.6 * share, 0.64, linewidth=0, **look))
    back: Any = {"boxstyle": "round,pad=0.2", "facecolor": PAPER, "edgecolor": "none"}
    words: Any = {"ha": "center", "va": "center", "fontsize": 9, "bbox": back}
    ax.text(1.35 + 1.3 * share, rank, f"{length} keys, values", **words)


def _box(ax: Axes, left: float, width: float, middle: float, words: str, height: float = 0.64) -> None:
    from matplotlib.patches import Rectangle

    corner = left, middle - height / 2
    ax.add_patch(Rectangle(corner, width, height, facecolor=PAPER, edgecolor=INK, linewidth=1.2))
    ax.text(left + width / 2, middle, words, ha="center", va="center", fontsize=9)


def _arrow(ax: Axes, begin: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", end, begin, arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 1.2})
