"""Pictures of serving: a cache's pages, a chunk's masks, the bytes of sent tensors, and each rank's cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringlab.viz.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    QUIET,
    RULE,
    SKY,
    WIDE,
    new_figure,
    rank_colour,
    styled,
)
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pages(
    held: Sequence[Sequence[tuple[str, int]]], page: int, sequences: Sequence[str], ranks: int
) -> Figure:
    """Return the pool of pages; held[p] = ((sequence, tokens), …), one entry for each sequence on page p.

    A page is a column with a band for each of `ranks`, and has room for page / ranks tokens in each band.
    """
    with styled():
        drawn = new_figure((8.0, 2.6))
        ax = drawn.subplots()
        for number, owners in enumerate(held):
            colours = [rank_colour(sequences.index(name)) for name, _ in owners]
            tokens, shared = max((tokens for _, tokens in owners), default=0), len(owners) > 1
            for rank in range(ranks):
                low, height, room = 1 - (rank + 1) / ranks, 0.9 / ranks, page // ranks
                panel.add_rectangle(ax, (number, low), 0.92, height, facecolor="#F2F4F7", edgecolor=RULE)
                if (filled := min(room, tokens - rank * room)) > 0:
                    look = {"facecolor": colours[0], "edgecolor": colours[1] if shared else PAPER}
                    width = 0.92 * filled / room
                    panel.add_rectangle(
                        ax, (number, low), width, height, hatch="///" if shared else "", **look
                    )
                if number == 0:
                    ax.text(
                        -0.08,
                        low + height / 2,
                        f"rank {rank}",
                        ha="right",
                        va="center",
                        color=QUIET,
                        fontsize=9,
                    )
            ax.text(number + 0.46, -0.08, f"page {number}", ha="center", va="top", color=QUIET, fontsize=9)
        boxes = [panel.rectangle((0, 0), 1, 1, facecolor=rank_colour(n)) for n in range(len(sequences))]
        drawn.legend(boxes, sequences, loc="outside lower center", ncols=len(sequences))
        ax.set(
            xlim=(-0.6, len(held)), ylim=(-0.3, 1.05), title="Pages of the pool, and whose tokens they hold"
        )
        ax.set_axis_off()
    return drawn


def describe_pages(held: Sequence[Sequence[tuple[str, int]]]) -> str:
    """Return the picture of `pages` in words."""
    words = [
        f"page {number}: {' and '.join(f'{tokens} tokens of {name}' for name, tokens in owners) or 'free'}"
        for number, owners in enumerate(held)
    ]
    return f"{len(held)} pages. {'; '.join(words)}."


def chunk_masks(prefix: int, new: int) -> Figure:
    """Return the keys that a chunk's queries see: really, and with a causal mask that ignores the prefix."""
    with styled():
        drawn = new_figure((8.0, 2.6))
        axes = drawn.subplots(1, 2, sharey=True)
        for ax, at, title in zip(
            axes, (prefix, 0), ("the chunk after its prefix", "is_causal=True"), strict=True
        ):
            panel.add_rectangle(ax, (0, 0), prefix + new, new, facecolor="#F2F4F7", edgecolor=RULE)
            ax.fill([0, at, at + new, 0], [0, 0, new, new], color=BLUE, linewidth=0)
            ax.axvline(prefix, color=INK, linewidth=1, linestyle=":")
            ax.set(
                title=title,
                xlim=(0, prefix + new),
                ylim=(new, 0),
                xlabel=f"keys: {prefix} of the prefix, {new} of the chunk",
            )
            ax.grid(False)
        axes[0].set_ylabel("queries of the chunk")
    return drawn


def describe_chunk_masks(prefix: int, new: int) -> str:
    """Return the two masks of `chunk_masks` in words."""
    return (
        f"Keys that the queries of a chunk see. In truth the first sees {prefix + 1} and the last {prefix + new}; "
        f"with is_causal=True the first sees 1 and the last {new}."
    )


def travellers(P: int) -> Figure:
    """Return two pictures of P ranks: in one, K/V blocks travel; in the other, queries travel.

    In the second picture, the partials of rank 0's queries then return to rank 0.
    """
    with styled():
        drawn = new_figure((8.0, 3.1))
        axes = drawn.subplots(1, 2)
        for ax, title in zip(axes, ("keys and values travel", "queries travel"), strict=True):
            keys_move = title.startswith("keys")
            at, left, right = (1.4, 0.3, 1.06) if keys_move else (0.75, 0.74, 1.36)
            for rank in range(P):
                colour = rank_colour(rank)
                panel.add_rectangle(ax, (rank + 0.08, 1.0), 0.2, 0.8, facecolor=colour, edgecolor=RULE)
                panel.add_rectangle(ax, (rank + 0.38, 0.6), 0.34, 0.3, facecolor=colour, edgecolor=RULE)
                ax.text(rank + 0.4, 0.3, f"rank {rank}", ha="center", color=QUIET, fontsize=9)
                _arrow(ax, (rank + left, at), (rank + right, at), colour)
            ends = f"to rank 0;\n{P - 1} hops"
            ax.text(P + (0.1 if keys_move else 0.4), at, ends, va="center", color=QUIET, fontsize=8)
            ax.text(0.18, 1.86, "K, V", ha="center", fontsize=9)
            ax.text(0.3, 0.75, "q", ha="right", va="center", fontsize=9)
            for rank in range(1, P) if not keys_move else ():
                low = 2.15 + 0.34 * (rank - 1)
                for place in (0.38, rank + 0.38):  # on rank 0, and where the partial is computed
                    _draw_partial(ax, (place, low), rank)
                _arrow(ax, (rank + 0.36, low + 0.13), (0.76, low + 0.13), rank_colour(0))
            ax.set(xlim=(0, P + 1.1), ylim=(0.15, 2.2 + 0.34 * (P - 1)), title=title)
            ax.set_axis_off()
        axes[1].text(
            P + 0.05,
            2.3,
            "partials of rank 0's\nqueries; the other\nranks get theirs\nthe same way",
            color=QUIET,
            fontsize=8,
        )
    return drawn


def _draw_partial(ax: Any, corner: tuple[float, float], rank: int) -> None:
    """Draw the partial of rank 0's queries over the keys of `rank`, half in each rank's colour."""
    for part, whose in enumerate((0, rank)):
        place = (corner[0] + 0.17 * part, corner[1]), 0.17, 0.26
        panel.add_rectangle(ax, *place, facecolor=rank_colour(whose), edgecolor=RULE)


def _arrow(ax: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.6})


def describe_travellers(P: int) -> str:
    """Return the two pictures of `travellers` in words."""
    return (
        f"{P} ranks, each with a tall block of keys and values and a small one of queries. Left: tall blocks go from rank to "
        "rank. Right: small blocks do, and the partials of rank 0's queries come home to rank 0 from every other rank."
    )


def bytes_by_prefix(prefixes: Sequence[int], lines: Mapping[str, Sequence[float]], meet: int) -> Figure:
    """Return the bytes that a rank sends, against cached tokens; the lines cross at `meet` tokens."""
    with styled():
        drawn = new_figure(WIDE)
        ax = drawn.subplots()
        for (name, values), colour, mark in zip(lines.items(), (ORANGE, BLUE), ("o", "s"), strict=True):
            ax.plot(prefixes, [value / 1e6 for value in values], color=colour, marker=mark, label=name)
        ax.axvline(meet, color=INK, linewidth=1, linestyle=":")
        ax.annotate(
            f"{meet:,} tokens",
            (meet, 0.9),
            (6, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
        )
        ax.set(xscale="log", yscale="log", xlabel="cached tokens before the chunk", ylabel="MB that a rank sends, per layer",
               title="Prefill of a chunk: keys and values travel, or queries do")  # fmt: skip
        ax.legend(loc="upper left")
    return drawn


def describe_bytes(prefixes: Sequence[int], lines: Mapping[str, Sequence[float]], meet: int) -> str:
    """Return the two lines of `bytes_by_prefix` in words."""
    ends = "; ".join(
        f"{name}: {values[0] / 1e6:,.1f} to {values[-1] / 1e6:,.1f} MB" for name, values in lines.items()
    )
    return f"Bytes of a rank with {prefixes[0]:,} to {prefixes[-1]:,} cached tokens. {ends}. They meet at {meet:,} tokens."


def hand_over(P: int) -> Figure:
    """Return the partials (heads × tokens) of each of P ranks after attending, and after the hand-over."""
    with styled():
        drawn = new_figure((8.0, 4.0))
        axes = drawn.subplots(2, P, squeeze=False)
        for rows, what in ((0, "attended"), (1, "handed over")):
            for rank in range(P):
                ax = axes[rows][rank]
                for head in range(P):
                    for token in range(P):
                        has = (token if what == "attended" else head) == rank
                        colour = rank_colour(token) if has else "#F2F4F7"
                        panel.add_rectangle(ax, (token, head), 0.94, 0.94, facecolor=colour, edgecolor=RULE)
                ax.set(
                    xlim=(-0.1, P),
                    ylim=(P, -0.1),
                    xticks=[],
                    yticks=[],
                    title=f"rank {rank}" if rows == 0 else "",
                )
                ax.set_aspect("equal")
                ax.grid(False)
            axes[rows][0].set_ylabel(f"{what}\nheads of rank 0 … {P - 1}", fontsize=9)
        drawn.supxlabel(f"in each square: tokens of rank 0 … {P - 1}", fontsize=9.5)
    return drawn


def describe_hand_over(P: int) -> str:
    """Return the picture of `hand_over` in words."""
    return (
        f"Squares of heads by tokens for {P} ranks. After attending, rank r has column r: all heads over its own tokens. "
        "After the hand-over it has row r: its own heads over the tokens of all ranks."
    )


def shares(grids: Mapping[str, Sequence[tuple[float, float, float, float]]]) -> Figure:
    """Return the part of a cache that each rank reads, for each way to share the cache.

    grids: by way, each rank's (first head, heads, first token, tokens), as shares of 1.
    """
    with styled():
        drawn = new_figure((2 + 3.0 * len(grids), 3.2))
        axes = drawn.subplots(1, len(grids), sharey=True, squeeze=False)[0]
        for ax, (name, parts) in zip(axes, grids.items(), strict=True):
            columns = sorted({token for _, _, token, _ in parts})
            for part in dict.fromkeys(parts):
                head, heads, token, tokens = part
                ranks = [rank for rank, other in enumerate(parts) if other == part]
                alone = len(ranks) == 1
                look = {
                    "facecolor": (BLUE, SKY, GREEN, ORANGE)[columns.index(token) % 4] if alone else "#E8ECF0",
                    "edgecolor": PAPER,
                    "linewidth": 2,
                }
                panel.add_rectangle(ax, (token, head), tokens, heads, hatch="" if alone else "//", **look)
                names = " and ".join(map(str, ranks))
                box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
                ax.text(
                    token + tokens / 2,
                    head + heads / 2,
                    names,
                    ha="center",
                    va="center",
                    color=INK,
                    fontsize=9,
                    bbox=box,
                )
            ax.set(title=name, xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], xlabel="tokens of the cache")
        axes[0].set_ylabel("K/V heads")
    return drawn


def describe_shares(grids: Mapping[str, Sequence[tuple[float, float, float, float]]]) -> str:
    """Return the alternative text of `shares`: each way to share a cache, in words."""
    parts = [f"{name}: {len(set(each))} different parts on {len(each)} ranks" for name, each in grids.items()]
    return f"Which part of a cache of heads and tokens each rank holds. {'; '.join(parts)}."
