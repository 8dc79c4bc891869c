"""Pictures of packed documents: tokens that see each other or should, labels, and each rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.packing.assignment import Assignment
from ringlab.viz.style import BLUE, INK, PAPER, QUIET, RED, RULE, new_figure, rank_colour, styled
from ringlab_course.figures import panel
from ringlab_course.figures.layout_tiles import owners

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def figure(layouts: Sequence[Layout], documents: Sequence[int]) -> Figure:
    """Return the visible pairs of each layout; a row has the colour of the rank that owns the query."""
    with styled():
        drawn = new_figure((8.0, 8.0 / len(layouts) + 0.9))
        axes = drawn.subplots(1, len(layouts), squeeze=False)[0]
        for ax, layout in zip(axes, layouts, strict=True):
            _draw_pairs(ax, layout, documents)
        axes[0].set_ylabel("query: place in the row")
        names = [f"query of rank {rank}" for rank in range(layouts[0].P)]
        boxes = [panel.rectangle((0, 0), 1, 1, facecolor=rank_colour(rank)) for rank in range(layouts[0].P)]
        drawn.legend(boxes, names, loc="outside lower center", ncols=len(names))
    return drawn


def _draw_pairs(ax: Axes, layout: Layout, documents: Sequence[int]) -> None:
    owner = owners(layout)
    tokens = np.arange(layout.S)
    seen = Mask(documents=tuple(documents)).visible(tokens, tokens)
    for query, key in np.argwhere(seen):
        place = (key - 0.5, query - 0.5), 1, 1
        panel.add_rectangle(
            ax, *place, facecolor=rank_colour(int(owner[query])), edgecolor=PAPER, linewidth=0.5
        )
    for bound in np.cumsum(documents)[:-1]:
        for line in (ax.axhline, ax.axvline):
            line(bound - 0.5, color=RULE, linewidth=0.8)
    for number, (start, length) in enumerate(zip(np.cumsum([0, *documents]), documents, strict=False)):
        right = start + length < 0.7 * layout.S  # to the right of the triangle if there is room
        x, side = (start + length, "left") if right else (start - 1, "right")
        ax.text(
            x, start + (length - 1) / 2, f"document {number}", color=QUIET, fontsize=9, ha=side, va="center"
        )
    ax.set(
        xlim=(-0.5, layout.S - 0.5),
        ylim=(layout.S - 0.5, -0.5),
        aspect="equal",
        xlabel="key: place in the row",
    )
    ax.set_title(f"{_titled(layout)}, {layout.P} ranks")
    ax.set_xticks(range(0, layout.S, 2))
    ax.set_yticks(range(0, layout.S, 2))
    ax.grid(False)


def _titled(layout: Layout) -> str:
    return layout.name.replace("_", " ").replace("zigzag", "zig-zag")


def describe(layouts: Sequence[Layout], documents: Sequence[int]) -> str:
    """Return the visible pairs of `figure` in words."""
    tokens = np.arange(layouts[0].S)
    seen = Mask(documents=tuple(documents)).visible(tokens, tokens)
    parts = []
    for layout in layouts:
        pairs = [int(seen[layout.positions(rank)].sum()) for rank in range(layout.P)]
        parts.append(f"{layout.name}: {', '.join(map(str, pairs))} pairs on ranks 0 to {layout.P - 1}")
    lengths = ", ".join(map(str, documents))
    return (
        f"Visible pairs of a row with documents of {lengths} tokens: one triangle for each document, nothing between "
        f"two of them. {'; '.join(parts)}."
    )


_PAIRS: dict[str, dict[str, Any]] = {
    "right": {"facecolor": BLUE, "edgecolor": PAPER},
    "too many": {"facecolor": RED, "edgecolor": PAPER, "hatch": "///"},
    "lost": {"facecolor": PAPER, "edgecolor": QUIET, "hatch": "..."},
}
"""The looks of a pair that is rightly seen, one that is wrongly seen, and one that is wrongly not seen."""


def mistaken(right: np.ndarray, seen: np.ndarray) -> Figure:
    """Return the pairs that are seen (`seen`) beside those that should be (`right`); both are bool (S, S)."""
    length = len(right)
    with styled():
        drawn = new_figure((4.6, 4.4))
        ax = drawn.subplots()
        for query, key in np.argwhere(right | seen):
            kind = "lost" if not seen[query, key] else "right" if right[query, key] else "too many"
            panel.add_rectangle(ax, (key - 0.5, query - 0.5), 1, 1, linewidth=0.5, **_PAIRS[kind])
        ax.set(
            xlim=(-0.5, length - 0.5), ylim=(length - 0.5, -0.5), aspect="equal",
            xlabel="key: place in the row", ylabel="query: place in the row",
            xticks=range(0, length, 2), yticks=range(0, length, 2),
        )  # fmt: skip
        ax.grid(False)
        boxes = [panel.rectangle((0, 0), 1, 1, linewidth=0.5, **look) for look in _PAIRS.values()]
        ax.legend(boxes, [*_PAIRS], loc="upper right")
    return drawn


def describe_mistaken(right: np.ndarray, seen: np.ndarray) -> str:
    """Return the picture of `mistaken` in words."""
    wrong = np.flatnonzero((right != seen).any(axis=1)).tolist()
    return (
        f"Of the pairs that should be seen, {int((right & seen).sum())} are and {int((right & ~seen).sum())} are lost; "
        f"{int((seen & ~right).sum())} pairs are seen that should not be. Wrong queries: {', '.join(map(str, wrong))}."
    )


def labels(
    layouts: Sequence[Layout], documents: Sequence[int], made: Sequence[np.ndarray], right: np.ndarray
) -> Figure:
    """Return a row's tokens for each layout, in the colours of their ranks, with labels.

    Tokens with a wrong label are hollow.
    made[layout]: (S,), the place of each token's label under that layout, negative if the token has none.
    right: (S,), the correct places.
    """
    with styled():
        drawn = new_figure((8.0, 0.85 * len(layouts) + 0.7))
        axes = drawn.subplots(len(layouts), 1, sharex=True, squeeze=False)[:, 0]
        for ax, layout, own in zip(axes, layouts, made, strict=True):
            for token, rank in enumerate(owners(layout)):
                colour, wrong = rank_colour(int(rank)), own[token] != right[token]
                filled = {"facecolor": colour, "edgecolor": PAPER}
                hollow = {"facecolor": PAPER, "edgecolor": colour, "linewidth": 2.5}
                size = 0.86 if wrong else 1.0  # the thick edge stays inside the cell
                corner = token - size / 2, (1 - size) / 2
                panel.add_rectangle(ax, corner, size, size, **(hollow if wrong else filled))
                look: dict[str, Any] = {"color": RED, "weight": "bold"} if wrong else {"color": INK}
                text = str(own[token]) if own[token] >= 0 else "none"
                ax.text(token, 0.5, text, ha="center", va="center", fontsize=8, **look)
            for bound in np.cumsum([0, *documents]):
                ax.plot([bound - 0.5] * 2, [-0.25, 1.25], color=INK, linewidth=1.6, clip_on=False)
            ax.set(xlim=(-0.5, layout.S - 0.5), ylim=(-0.25, 1.25), yticks=[], xticks=range(layout.S))
            ax.set_ylabel(_titled(layout), rotation=0, ha="right", va="center")
            ax.grid(False)
            ax.spines[:].set_visible(False)
        axes[-1].set_xlabel("place in the row; thick lines are the bounds of documents")
        names = [f"rank {rank}" for rank in range(layouts[0].P)]
        boxes = [panel.rectangle((0, 0), 1, 1, facecolor=rank_colour(rank)) for rank in range(layouts[0].P)]
        drawn.legend(boxes, names, loc="outside upper right", ncols=len(names))
    return drawn


def describe_labels(
    layouts: Sequence[Layout], documents: Sequence[int], made: Sequence[np.ndarray], right: np.ndarray
) -> str:
    """Return the picture of `labels` in words."""
    parts = [
        f"{layout.name}: wrong at {', '.join(map(str, np.flatnonzero(own != right))) or 'no token'}"
        for layout, own in zip(layouts, made, strict=True)
    ]
    return f"Labels of a row with documents of {', '.join(map(str, documents))} tokens. {'; '.join(parts)}."


def rectangle(documents: Sequence[int], columns: int) -> Figure:
    """Return the same documents as a padded batch, one per line, and packed into rows of `columns` tokens."""
    longest = max(documents)
    with styled():
        drawn = new_figure((8.0, 3.4))
        padded, packed = drawn.subplots(1, 2)
        for line, length in enumerate(documents):
            padded.barh(line, longest, color="#E8ECF0", edgecolor=RULE, linewidth=0.4, height=0.9)
            padded.barh(line, length, color=rank_colour(line), edgecolor=PAPER, linewidth=0.4, height=0.9)
        at = 0
        for number, length in enumerate(documents):
            _draw_piece(packed, at, length, columns, rank_colour(number))
            at += length
        rows = -(-at // columns)
        padded.set(
            title=f"Padded: {len(documents)} lines of {longest:,} tokens", xlabel="tokens", ylabel="line"
        )
        packed.set(title=f"Packed: {rows} lines of {columns:,} tokens", xlabel="tokens")
        for ax, lines in ((padded, len(documents)), (packed, len(documents))):
            ax.set(ylim=(lines - 0.5, -0.5), xlim=(0, longest), yticks=[])
            ax.grid(False)
    return drawn


def _draw_piece(ax: Any, at: int, length: int, columns: int, colour: str) -> None:
    while length > 0:
        line, column = divmod(at, columns)
        part = min(length, columns - column)
        ax.barh(line, part, left=column, color=colour, edgecolor=PAPER, linewidth=0.4, height=0.9)
        at, length = at + part, length - part


def describe_rectangle(documents: Sequence[int], columns: int) -> str:
    """Return the two batches of `rectangle` in words."""
    total, longest = sum(documents), max(documents)
    share = 1 - total / (longest * len(documents))
    return (
        f"{len(documents)} documents of {total:,} tokens. Padded to the longest, {longest:,} tokens, {share:.0%} of the batch "
        f"is padding. Packed, they fill {-(-total // columns)} lines of {columns:,} tokens."
    )


def on_ranks(assignment: Assignment) -> list[list[tuple[int, int]]]:
    """Return, for each rank, (document, number of ranks that share it) for each document of the rank."""
    held: list[list[tuple[int, int]]] = [[] for _ in range(assignment.P)]
    for batch in assignment.micro_batches:
        for each in batch:
            for rank in each.ranks:
                held[rank].append((each.sequence, each.degree))
    return held


Placed = Sequence[Sequence[Sequence[tuple[int, float]]]]
"""placed[assignment][rank] = ((document, ms), …)."""


def groups(placed: Placed, titles: Sequence[str], lengths: Sequence[int], bound: float) -> Figure:
    """Return a bar for every rank of each assignment, with a piece for every document on the rank.

    A document on neighbouring ranks is drawn as one wide piece, with its number of tokens if there is room.
    The dashed line is at `bound` ms.
    """
    with styled():
        drawn = new_figure((8.0, 3.6))
        axes = drawn.subplots(1, len(placed), sharey=True, squeeze=False)[0]
        for ax, ranks, title in zip(axes, placed, titles, strict=True):
            for first, last, document, low, high in _pieces(ranks):
                left, width = first - 0.45, last - first + 0.9
                look: dict[str, Any] = {"color": rank_colour(document), "edgecolor": PAPER, "linewidth": 0.5}
                ax.bar(left, high - low, bottom=low, width=width, align="edge", **look)
                upright = 90 if first == last else 0
                if high - low > bound / (9 if upright else 16):
                    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.4}
                    look = {"ha": "center", "va": "center", "color": INK, "fontsize": 7, "bbox": box}
                    look["rotation"] = upright
                    ax.text((first + last) / 2, (low + high) / 2, f"{lengths[document]:,}", **look)
            ax.axhline(bound, color=INK, linewidth=1, linestyle="--", label="bound")
            ax.set(title=title, xlabel="rank", xticks=range(len(ranks)))
            ax.grid(False, axis="x")
        axes[0].set_ylabel("ms of a step")
        axes[-1].legend(loc="upper right")
    return drawn


def _pieces(ranks: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, int, int, float, float]]:
    """Return each document's pieces: first and last rank, document, lower edge and upper edge.

    Parts on neighbouring ranks at the same height form one piece.
    """
    found: list[tuple[int, int, int, float, float]] = []
    for rank, parts in enumerate(ranks):
        at = 0.0
        for document, ms in parts:
            before = next((each for each in found if _goes_on(each, rank, document, at, at + ms)), None)
            if before is not None:
                found.remove(before)
            found.append((rank if before is None else before[0], rank, document, at, at + ms))
            at += ms
    return found


def _goes_on(
    piece: tuple[int, int, int, float, float], rank: int, document: int, low: float, high: float
) -> bool:
    """Return whether this part of a document continues a piece on the previous rank, at the same height."""
    _, last, other, *edges = piece
    return (last, other) == (rank - 1, document) and np.allclose(edges, (low, high), atol=1e-6)


def describe_groups(placed: Placed, titles: Sequence[str]) -> str:
    """Return the bars of `groups` in words."""
    parts = []
    for ranks, title in zip(placed, titles, strict=True):
        ends = [sum(ms for _, ms in parts) for parts in ranks]
        parts.append(
            f"{title}: {min(ends):.0f} to {max(ends):.0f} ms, {sum(map(len, ranks))} parts of documents"
        )
    return f"What each rank does in a step, document by document. {'; '.join(parts)}."
