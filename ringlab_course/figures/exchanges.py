"""Pictures of the data that each rank holds: in an all-to-all, in four schedules and in a step of decode.

Two other pictures compare times: those of a hop and of computing a block, and those of whole prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.cost.units import counted
from ringlab.viz.style import (
    GREEN,
    HATCHES,
    INK,
    ORANGE,
    PAPER,
    PURPLE,
    QUIET,
    RED,
    RULE,
    SKY,
    new_figure,
    rank_colour,
    styled,
)
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P, TOKENS = 4, 16
"""The number of ranks, which is also that of heads, and the number of tokens. The pictures follow rank 1."""
OWN, TRADED, OTHERS = 1, 2, 3
LOOKS: dict[int, tuple[str, dict[str, Any]]] = {
    OWN: ("rank 1 computes: its own tokens", {"facecolor": rank_colour(1), "hatch": HATCHES[1]}),
    TRADED: ("rank 1 computes: tokens from the all-to-all", {"facecolor": "#B7DDF4", "hatch": HATCHES[4]}),
    OTHERS: ("keys and values of other ranks", {"facecolor": PURPLE, "hatch": ".."}),
}


def holders() -> dict[str, np.ndarray]:
    """Return which rank holds each (head, stretch of tokens) before and after the all-to-all: int64 (P, P)."""
    ranks = np.arange(P)
    return {
        "before: some tokens of all heads": np.tile(ranks, (P, 1)),
        "after: all tokens of some heads": np.tile(ranks[:, None], (1, P)),
    }


def trade() -> Figure:
    """Return two grids, heads by tokens, in the colours of the ranks that hold the pieces.

    One piece is framed.
    """
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
    """Return the picture of `trade` in words."""
    return (
        f"{P} heads by {TOKENS} tokens on {P} ranks, before and after an all-to-all. Before it, each rank holds {TOKENS // P} "
        "neighbouring tokens of all heads: four columns, rank 0 to 3. After it, each rank holds all tokens of one head: "
        "four rows, rank 0 to 3. The piece of head 2 that rank 1 holds before is rank 2's afterwards."
    )


def _piece(ax: Axes, head: int, stretch: int, rank: int) -> None:
    width = TOKENS // P
    box: Any = (stretch * width + 0.1, head - 0.45), width - 0.2, 0.9
    panel.add_rectangle(
        ax, *box, facecolor=rank_colour(rank), edgecolor=PAPER, hatch=HATCHES[rank], linewidth=0
    )
    if (head, stretch) == (2, 1):
        panel.add_rectangle(ax, *box, facecolor="none", edgecolor=INK, linewidth=3)
    look: dict[str, Any] = {"boxstyle": "round,pad=0.15", "facecolor": PAPER, "edgecolor": "none"}
    at = (stretch + 0.5) * width, head
    ax.text(*at, str(rank), ha="center", va="center_baseline", fontsize=9, color=INK, bbox=look)


def panels() -> dict[str, np.ndarray]:
    """Return rank 1's computations, and the K/V that it needs, by schedule: int64 (heads, tokens).

    Each entry is a key of LOOKS, or 0.
    """
    every, own = range(P), range(4, 8)
    return {
        "ring": _held(every, own, others=range(16)),
        "all-gather": _held(every, own, others=range(16)),
        "Ulysses": _held([1], own, traded=range(16)),
        "hybrid, U = 2": _held([2, 3], own, traded=range(8), others=range(8, 16)),
    }


def _held(
    heads: Sequence[int],
    own: Sequence[int],
    traded: Sequence[int] = (),
    others: Sequence[int] = (),
) -> np.ndarray:
    grid = np.zeros((P, TOKENS), np.int64)
    for kind, tokens in ((OTHERS, others), (TRADED, traded), (OWN, own)):
        grid[np.ix_(heads, list(tokens))] = kind
    return grid


def schedules() -> Figure:
    """Return a panel for each schedule that shows what rank 1 of 4 works on, heads by tokens."""
    plain: Any = {"edgecolor": "white", "linewidth": 0}
    with styled():
        figure = new_figure((8.0, 3.5))
        for ax, (name, grid) in zip(figure.subplots(1, P, sharey=True), panels().items(), strict=True):
            for kind, (_, look) in LOOKS.items():
                heads, tokens = np.nonzero(grid == kind)
                ax.bar(tokens, 0.9, 1.0, heads - 0.45, align="edge", **plain, **look)
            ax.set(title=name, xlim=(0, TOKENS), xticks=range(0, 17, 4), yticks=range(P), xlabel="tokens")
            ax.set_ylim(-0.5, 4.2)
            ax.grid(visible=False)
            owners = ["row {0, 1}", "row {2, 3}"] if name.startswith("hybrid") else [*map(str, range(P))]
            for at, owner in enumerate(owners):
                wide = TOKENS / len(owners)
                ax.plot([at * wide + 0.3, (at + 1) * wide - 0.3], [3.6, 3.6], color=QUIET, linewidth=1.2)
                ax.text((at + 0.5) * wide, 3.87, owner, ha="center", va="center", fontsize=8.5)
        beside: Any = {"ha": "center", "va": "center", "fontsize": 8.5, "color": QUIET}
        plate: Any = {"boxstyle": "round,pad=0.2", "facecolor": PAPER, "edgecolor": "none"}
        for hop, at in enumerate((2, 14, 10), start=1):  # from rank 0, then 3, then 2
            figure.axes[0].text(at, 1.5, f"hop\n{hop}", ha="center", va="center", fontsize=8.5, bbox=plate)
        for at, words in ((2, "all\nat\nonce"), (12, "all\nat once")):
            figure.axes[1].text(at, 1.5, words, ha="center", va="center", fontsize=8.5, bbox=plate)
        figure.axes[3].text(12, 2.5, "hop 1:\nrank 3", ha="center", va="center", fontsize=8.5, bbox=plate)
        figure.axes[2].text(8, 2.5, "other heads:\nranks 2, 3", **beside)
        figure.axes[2].text(8, 0, "head 0: rank 0", **beside)
        figure.axes[3].text(8, 0.5, "other heads:\nranks 0, 2", **beside)
        figure.axes[0].text(-0.6, 3.87, "rank", ha="right", va="center", fontsize=8.5)
        figure.axes[0].set_ylabel("heads")
        handles = [panel.patch(label=label, **plain, **look) for label, look in LOOKS.values()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8.5)
        figure.suptitle(
            "Each schedule gives rank 1 a quarter of the work, but other keys and values", fontsize=11
        )
    return figure


def describe_schedules() -> str:
    """Return the picture of `schedules` in words."""
    return (
        "What rank 1 of 4 works on, heads against tokens, by schedule. Ring: the queries of its 4 tokens in all 4 heads; keys "
        "and values of the other ranks come by in three hops, from rank 0, 3 and 2. All-gather: the same queries, and the keys "
        "and values of all 12 other tokens at once. Ulysses: all 16 tokens in one head, 12 of them from the all-to-all. Hybrid: the rows are ranks 0, 1 and ranks "
        "2, 3. Rank 1 computes the 8 tokens of its row in heads 2 and 3, 4 of them from the all-to-all; the keys and "
        "values of the other row's 8 tokens come from rank 3, which has the same heads, so ranks 1 and 3 form a ring. Ranks 0 "
        "and 2 form the ring of heads 0 and 1."
    )


def steps(timed: Mapping[str, tuple[int, float, float]]) -> Figure:
    """Return two bars for each schedule: the time of a hop and, below, that of the block computed meanwhile.

    timed: by schedule, the number of hops, the seconds of a hop and the seconds of a block.
    """
    with styled():
        figure = new_figure((8.0, 0.62 * len(timed) + 1.4))
        ax = figure.subplots()
        for row, (hops, hop_s, block_s) in enumerate(timed.values()):
            hop, block = hop_s * 1e6, block_s * 1e6
            looks: Any = {"height": 0.36, "linewidth": 0}
            ax.barh(row - 0.2, hop, color=ORANGE, label="hop" if row == 0 else None, **looks)
            ax.barh(row + 0.2, block, color=SKY, label="block beside it" if row == 0 else None, **looks)
            if hop > block:
                left: Any = {"facecolor": PAPER, "edgecolor": RED, "hatch": "/////", **looks}
                ax.barh(row - 0.2, hop - block, left=block, label="exposed" if row == 0 else None, **left)
            told = f"{hops} × {hop - block:.0f} µs exposed" if hop > block else "hop hidden"
            ax.text(max(hop, block) + 4, row, told, va="center", fontsize=9)
        names = [f"{name}: {counted(hops, 'hop')}" for name, (hops, _, _) in timed.items()]
        ax.set(yticks=range(len(timed)), yticklabels=names, xlabel="µs")
        ax.set(ylim=(len(timed) - 0.5, -0.5), xlim=(0, 1.2 * max(max(it[1:]) for it in timed.values()) * 1e6))
        ax.grid(visible=False, axis="y")
        figure.legend(loc="outside lower center", ncols=3, fontsize=9)
        ax.set_title("One step: a hop, and the block that is computed meanwhile", fontsize=11)
    return figure


def describe_steps(timed: Mapping[str, tuple[int, float, float]]) -> str:
    """Return the picture of `steps` in words."""
    each = (
        f"{name}, {counted(hops, 'hop')}: a hop of {hop_s * 1e6:.0f} µs beside a block of {block_s * 1e6:.0f} µs"
        for name, (hops, hop_s, block_s) in timed.items()
    )
    return "A hop and the block that is computed meanwhile. " + "; ".join(each) + "."


def prompts(times: Mapping[str, Mapping[str, float]]) -> Figure:
    """Return a panel for each prompt, with a bar for each schedule. The least is marked.

    times: the seconds of a prefill, by prompt and by schedule.
    """
    with styled():
        figure = new_figure((8.0, 2.9))
        axes = figure.subplots(1, len(times), sharey=True, squeeze=False)[0]
        for ax, (prompt, seconds) in zip(axes, times.items(), strict=True):
            best = min(seconds, key=seconds.__getitem__)
            longest = 1e3 * max(seconds.values())
            for row, (name, value) in enumerate(seconds.items()):
                marked: Any = {"fontweight": "bold"} if name == best else {}
                ax.barh(row, 1e3 * value, height=0.68, color=GREEN if name == best else SKY, linewidth=0)
                ax.text(
                    1e3 * value + 0.03 * longest, row, f"{1e3 * value:.1f}", va="center", fontsize=9, **marked
                )
            ax.set(xlim=(0, 1.42 * longest), xticks=[], ylim=(len(seconds) - 0.5, -0.5))
            ax.set(yticks=range(len(seconds)), yticklabels=[*seconds])
            ax.set_title(prompt, fontsize=10)
            ax.grid(visible=False)
        figure.suptitle("The shorter the prompt, the longer the best rows", fontsize=11)
        figure.supxlabel("milliseconds of the whole prefill   green: the fastest", fontsize=9.5)
    return figure


def describe_prompts(times: Mapping[str, Mapping[str, float]]) -> str:
    """Return the picture of `prompts` in words."""
    each = []
    for prompt, seconds in times.items():
        best = min(seconds, key=seconds.__getitem__)
        bars = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in seconds.items())
        each.append(f"{prompt}: {bars}; the fastest is {best}.")
    return " ".join(["Times of whole prefills.", *each])


FOLLOWED = 1
"""The rank whose messages `decode_step` draws dark."""
HEADINGS = {0.5: "on all ranks", 2.3: "stays where it is", 4.35: "its part", 7.25: "on all ranks"}
"""The headings of the columns of `decode_step`, by their horizontal place."""


def decode_step(lengths: Sequence[int]) -> Figure:
    """Return a picture of a decode step: each rank attends to its cached keys, sends its part to all, and merges.

    lengths: the number of cached keys on each rank.
    """
    with styled():
        figure = new_figure((8.0, 0.62 * len(lengths) + 1.2))
        ax = figure.subplots()
        for rank, length in enumerate(lengths):
            ax.text(-0.1, rank, f"rank {rank}", ha="right", va="center", fontsize=9.5)
            _box(ax, 0.15, 0.7, rank, "query")
            _arrow(ax, (0.9, rank), (1.2, rank))
            _cache(ax, rank, length, length / max(lengths))
            _arrow(ax, (3.4, rank), (3.75, rank))
            _box(ax, 3.8, 1.1, rank, "out, lse")
            for to in range(len(lengths)):
                followed = rank == FOLLOWED
                _arrow(ax, (4.95, rank), (6.55, to), color=INK if followed else RULE, above=followed)
            _box(ax, 6.6, 1.3, rank, "merged out")
        for left, words in HEADINGS.items():
            ax.text(left, -0.75, words, ha="center", va="center", fontsize=9, color=QUIET)
        ax.text(5.75, -0.75, "to every rank's merge", ha="center", va="center", fontsize=9, color=QUIET)
        ax.set(xlim=(-0.85, 8.0), ylim=(len(lengths) - 0.4, -1.0))
        ax.set_axis_off()
        ax.set_title("One new token: its query meets a cache that is sharded over ranks", fontsize=11)
        figure.supxlabel(f"dark: what rank {FOLLOWED} does with its part", fontsize=9, color=QUIET)
    return figure


def describe_decode_step(lengths: Sequence[int]) -> str:
    """Return the picture of `decode_step` in words."""
    keys = ", ".join(map(str, lengths))
    return (
        f"One step of decode on {len(lengths)} ranks. Every rank has the query of the new token. It meets the keys and values "
        f"that the rank has cached ({keys}), which stay where they are. Each rank gets a partial out and its lse, and sends "
        "them to every other rank; every rank merges all parts into the same out."
    )


def _cache(ax: Axes, rank: int, length: int, share: float) -> None:
    look: Any = {"facecolor": rank_colour(rank), "edgecolor": PAPER, "hatch": HATCHES[rank % len(HATCHES)]}
    panel.add_rectangle(ax, (1.25, rank - 0.32), 2.1 * share, 0.64, linewidth=0, **look)
    back: Any = {"boxstyle": "round,pad=0.2", "facecolor": PAPER, "edgecolor": "none"}
    words: Any = {"ha": "center", "va": "center", "fontsize": 9, "bbox": back}
    ax.text(1.25 + 1.05 * share, rank, f"{length} keys, values", **words)


def _box(ax: Axes, left: float, width: float, middle: float, words: str, height: float = 0.64) -> None:
    corner = left, middle - height / 2
    panel.add_rectangle(ax, corner, width, height, facecolor=PAPER, edgecolor=INK, linewidth=1.2)
    ax.text(left + width / 2, middle, words, ha="center", va="center", fontsize=9)


def _arrow(
    ax: Axes, begin: tuple[float, float], end: tuple[float, float], color: str = INK, *, above: bool = False
) -> None:
    look = {"arrowstyle": "->", "color": color, "linewidth": 1.2}
    ax.annotate("", end, begin, arrowprops=look, zorder=4 if above else 3)
