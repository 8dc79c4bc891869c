"""Layouts side by side: the owner of every token, and the score tiles that remain to be computed.

A tile is the `tile` × `tile` scores of neighbouring queries in one rank's memory with neighbouring keys in
another rank's. A tile is skipped only if the mask hides all its scores. So the layout decides how many tiles
have to be computed, and how many of those are partly masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.errors import LayoutError
from ringlab.layout import Layout, Run
from ringlab.tile import right_edge
from ringlab.viz.frontend import import_widgets, record_frames, show_player
from ringlab.viz.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    QUIET,
    RED,
    RULE,
    WIDE,
    as_html,
    new_figure,
    rank_colour,
    still_image,
    styled,
)
from ringlab_course.figures import panel
from ringlab_course.figures.layout_tiles import FULL, NAMED, PARTIAL, SKIP, Tiles, owners, tiles_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The strips above use colours for ranks, so the kinds of tiles under the mask are greys.
LOOKS: dict[int, dict[str, Any]] = {
    FULL: {"facecolor": "#AAB4BF", "edgecolor": PAPER},
    PARTIAL: {"facecolor": INK, "edgecolor": PAPER, "hatch": "////"},
    SKIP: {"facecolor": PAPER, "edgecolor": RULE},
}
WORDS = {
    FULL: "computed, all visible",
    PARTIAL: "computed, partly masked",
    SKIP: "skipped, all masked",
}
MOST_PIECES = 100
"""The most pieces that a strip shows separately; more pieces would be thinner than a letter."""
DARK = {BLUE, RED, GREEN}
"""Rank colours on which white text reads better."""


def figure(
    layouts: Sequence[Layout],
    tile: int = 4,
    *,
    causal: bool = True,
    documents: Sequence[int] | None = None,
) -> Figure:
    """Return a figure with the layouts' tokens as strips, one below the other, and their tiles side by side.

    Raises: LayoutError if there is no layout, and as `tiles_of` does.
    """
    if not layouts:
        raise LayoutError("at least one layout", "none")
    pictures = [tiles_of(layout, tile, causal=causal, documents=documents) for layout in layouts]
    width = min(4.0, 7.9 / len(layouts))
    strips = 0.5 * len(layouts) + (0.25 if documents else 0.0)
    with styled():
        drawn = new_figure((8.0, strips + width + 2.1))
        parts: Any = drawn.subfigures(2, 1, height_ratios=(strips + 0.6, width + 1.5))
        upper, lower = parts
        heading: Any = {"fontsize": 11, "fontweight": "bold"}
        upper.suptitle(f"The owner of each token: {_sizes(layouts[0])}", **heading)
        lower.suptitle(f"The score tiles that each rank computes: tiles of {tile} × {tile} scores", **heading)
        for number, (ax, layout) in enumerate(
            zip(upper.subplots(len(layouts), 1, squeeze=False)[:, 0], layouts, strict=True)
        ):
            draw_tokens(ax, layout, documents, first=number == 0, last=number == len(layouts) - 1)
        for number, (ax, picture) in enumerate(
            zip(lower.subplots(1, len(layouts), squeeze=False)[0], pictures, strict=True)
        ):
            draw_tiles(ax, picture, names=number == 0)
        _legend(lower, pictures)
    return drawn


def _sizes(layout: Layout) -> str:
    return f"{layout.S:,} tokens on {layout.P} rank{'s' * (layout.P > 1)}"


def draw_tokens(
    ax: Axes, layout: Layout, documents: Sequence[int] | None = None, *, first: bool = True, last: bool = True
) -> None:
    """Draw the sequence as a strip: every piece in its rank's colour and with the rank's number."""
    owner = owners(layout)
    begins = np.cumsum([0, *documents[:-1]]) if documents else [0]
    starts = np.union1d(np.flatnonzero(np.diff(owner, prepend=-1)), begins)
    if len(starts) > MOST_PIECES:
        ax.barh(0, layout.S, 1, color=PAPER, edgecolor=QUIET, hatch="|||||", linewidth=0.6)
        turns = ", ".join(str(owner[start]) for start in starts[: 2 * layout.P + 1])
        ax.text(layout.S / 2, 0, f"dealt in turn to ranks {turns}, …", **_plate())
    else:
        for start, stop in zip(starts, (*starts[1:], layout.S), strict=True):
            _draw_piece(ax, int(owner[start]), int(start), int(stop), layout.S)
    _draw_documents(ax, layout, documents, named=first)
    ax.set(xlim=(0, layout.S), ylim=(0.5, -0.5))
    ax.set_yticks([0], [layout.name], fontsize=9.5, color=INK)
    panel.bare(ax, labelbottom=last, labelsize=9)
    if last:
        ax.set_xlabel("token (global position); the number is the rank that owns it", fontsize=9)


def _draw_piece(ax: Axes, rank: int, start: int, stop: int, S: int) -> None:
    """Draw a piece of the sequence in its rank's colour, with the rank's number if it fits."""
    colour = rank_colour(rank)
    ax.barh(0, stop - start, 1, left=start, color=colour, edgecolor=PAPER, linewidth=0.6)
    if (stop - start) / S * 6.6 * 72 >= 5.4 * len(str(rank)):
        ink = PAPER if colour in DARK else INK
        plate = {"facecolor": colour, "edgecolor": "none", "pad": 0.4}  # legible on a document's flag
        ax.text((start + stop) / 2, 0, str(rank), ha="center", va="center", fontsize=8, color=ink, bbox=plate)


def draw_tiles(ax: Axes, picture: Tiles, *, names: bool = True) -> None:
    """Draw the score matrix in local order, tile by tile; heavy lines separate the ranks."""
    from matplotlib.collections import PatchCollection

    bounds, S, P = picture.bounds, picture.layout.S, picture.layout.P
    many = len(bounds) > 48
    for kind, look in LOOKS.items():
        boxes = [
            panel.rectangle((bounds[j], bounds[i]), bounds[j + 1] - bounds[j], bounds[i + 1] - bounds[i])
            for i, j in np.argwhere(picture.kinds == kind)
        ]
        shown = look | ({"hatch": None, "edgecolor": look["facecolor"]} if many else {})
        ax.add_collection(PatchCollection(boxes, linewidth=0.0 if many else 0.6, gid=WORDS[kind], **shown))
    edges = np.cumsum([0, *(picture.layout.length(rank) for rank in range(P))])
    for edge in edges:
        ax.plot((0, S), (edge, edge), color=INK, linewidth=1.1, clip_on=False)
        ax.plot((edge, edge), (0, S), color=INK, linewidth=1.1, clip_on=False)
    ax.set(xlim=(0, S), ylim=(S, 0), aspect="equal")
    middles = (edges[:-1] + edges[1:]) / 2
    ax.set_xticks(middles, [str(rank) for rank in range(P)], fontsize=8.5)
    ax.set_yticks(middles, [str(rank) for rank in range(P)], fontsize=8.5)
    ax.set_xlabel("keys of rank …", fontsize=9)
    if names:
        ax.set_ylabel("queries of rank …", fontsize=9)
    ax.set_title(picture.layout.name, fontsize=10.5, pad=39)
    lines = ax.annotate(
        _result(picture), (0, 1), (0, 4), "axes fraction", textcoords="offset points", fontsize=8.5
    )
    # matplotlib's layout ignores this text, because the title reserves the space above the panel, and a long
    # text must not make the panel narrower.
    lines.set_in_layout(False)
    panel.bare(ax)


def describe(
    layouts: Sequence[Layout],
    tile: int = 4,
    *,
    causal: bool = True,
    documents: Sequence[int] | None = None,
) -> str:
    """Return the picture in words: its alternative text."""
    pictures = [tiles_of(layout, tile, causal=causal, documents=documents) for layout in layouts]
    words = (
        f"{pictures[0].layout.S:,} tokens on {pictures[0].layout.P} ranks, tiles of {tile} × {tile} scores. "
    )
    if documents is not None:
        words += f"{len(documents)} documents of {', '.join(map(str, documents))} tokens. "
    return words + " ".join(_sentence(picture) for picture in pictures)


def meetings(queries: Sequence[Run], keys: Run) -> Figure:
    """Return a panel for each run of queries: which keys each of its rows sees, the tiles, and the shift d."""
    with styled():
        drawn = new_figure((2.05 * len(queries), 2.75))
        for ax, run in zip(drawn.subplots(1, len(queries), squeeze=False)[0], queries, strict=True):
            seen = run.positions[:, None] >= keys.positions[None, :]
            for i, j in np.ndindex(seen.shape):
                look = LOOKS[FULL if seen[i, j] else SKIP]
                panel.add_rectangle(ax, (j, i), 1, 1, linewidth=0.8, **{**look, "edgecolor": QUIET})
            d = (run.start - keys.start) // run.step
            for tile in right_edge(run.length, keys.length, d):
                rows, columns = tile.rows, tile.keys
                size = columns.stop - columns.start, rows.stop - rows.start
                outline: dict[str, Any] = {"fill": False, "edgecolor": INK, "linewidth": 2.6, "zorder": 4}
                panel.add_rectangle(ax, (columns.start, rows.start), *size, **outline)
            ax.set(xlim=(-0.08, keys.length + 0.08), ylim=(run.length + 0.08, -0.08), aspect="equal")
            ax.set_title(f"d = {d}".replace("-", "−"), fontsize=11)
            ax.set_xticks(
                [j + 0.5 for j in range(keys.length)], map(str, keys.positions.tolist()), fontsize=8.5
            )
            ax.set_yticks(
                [i + 0.5 for i in range(run.length)], map(str, run.positions.tolist()), fontsize=8.5
            )
            ax.set_xlabel("keys", fontsize=9)
            ax.set_ylabel("queries", fontsize=9)
            panel.bare(ax)
        looks = (("visible", LOOKS[FULL]), ("hidden", LOOKS[SKIP]))
        handles = [panel.patch(label=word, **{**look, "edgecolor": QUIET}) for word, look in looks]
        handles.append(panel.patch(label="tile", fill=False, edgecolor=INK, linewidth=2.2))
        drawn.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    return drawn


def describe_meetings(queries: Sequence[Run], keys: Run) -> str:
    """Return in words what `meetings` shows."""
    sentences = []
    for run in queries:
        seen = (run.positions[:, None] >= keys.positions[None, :]).sum(axis=1).tolist()
        d = (run.start - keys.start) // run.step
        count = len(right_edge(run.length, keys.length, d))
        tiles = "1 tile" if count == 1 else f"{count} tiles"
        sentences.append(
            f"Queries {run.positions.tolist()}, d = {d}: the rows see the first {seen} keys, {tiles}."
        )
    return f"Which of the keys {keys.positions.tolist()} each query sees. " + " ".join(sentences)


def dial(chunks: Sequence[int], cost: Mapping[bool, Sequence[float]], tile: int, title: str) -> Figure:
    """Return a picture of how far the cost of dealt layouts is above the ideal, by chunk.

    cost[folded]: for each chunk, the cost divided by the ideal.
    """
    with styled():
        drawn = new_figure(WIDE)
        ax = drawn.subplots()
        for folded, colour, mark, size in ((False, ORANGE, "o", 11), (True, BLUE, "s", 6)):
            above = [100 * (each - 1) for each in cost[folded]]
            ax.plot(
                chunks, above, color=colour, marker=mark, ms=size, label="folded" if folded else "round-robin"
            )
        ax.axvline(tile, color=INK, linewidth=1, linestyle=":")
        ax.annotate("chunk = tile", (tile, 40), (6, 0), textcoords="offset points")
        for name, x, y in (
            ("striped", chunks[0], 4.2),
            ("zig-zag", chunks[-2] * 0.44, 0.5),
            ("contiguous", chunks[-1] * 0.22, 80),
        ):
            ax.text(x, y, name, weight="bold")
        ax.set(
            xscale="log", yscale="log", xlabel="chunk (tokens)", ylabel="cost above ideal (%)", title=title
        )
        ax.set_xticks(chunks[::2], [str(chunk) for chunk in chunks[::2]])
        ax.set_yticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
        ax.minorticks_off()
        ax.legend(loc="upper left")
    return drawn


def describe_dial(chunks: Sequence[int], cost: Mapping[bool, Sequence[float]], tile: int, title: str) -> str:
    """Return in words what `dial` shows."""
    lines = (
        f"{name}: " + ", ".join(f"{100 * (each - 1):.1f}" for each in cost[folded])
        for folded, name in ((False, "round-robin"), (True, "folded"))
    )
    return (
        f"{title}. Cost above ideal in percent, at chunks of {', '.join(map(str, chunks))} tokens; the tile is {tile}. "
        + "; ".join(lines)
        + "."
    )


def player(S: int = 64, P: int = 4, tiles: Sequence[int] = (1, 2, 4, 8, 16)) -> Any:
    """Return a widget with sliders for the tile and the ranks; the words are below the picture."""
    ipywidgets = import_widgets()

    tile = ipywidgets.SelectionSlider(options=list(tiles), value=tiles[len(tiles) // 2], description="tile")
    ranks = ipywidgets.IntSlider(value=P, min=1, max=8, description="ranks")

    def draw() -> str:
        layouts = [make(S, ranks.value) for make in NAMED.values()]
        return as_html(figure(layouts, tile.value), describe(layouts, tile.value))

    return ipywidgets.VBox([ipywidgets.HBox([tile, ranks]), panel.moved_by(draw, tile, ranks)])


def play(S: int = 64, P: int = 4, tiles: Sequence[int] = (1, 2, 4, 8, 16)) -> None:
    """Show the player if a person can use it, otherwise record the picture of each tile.

    Readers who cannot play the recording see the picture of the middle tile.
    """
    layouts, tile = [make(S, P) for make in NAMED.values()], tiles[len(tiles) // 2]
    show_player(
        lambda: player(S, P, tiles),
        lambda: record_frames(
            [as_html(figure(layouts, each), describe(layouts, each)) for each in tiles],
            "tile",
            still_image(figure(layouts, tile), describe(layouts, tile)),
            names=tiles,
        ),
    )


def _result(picture: Tiles) -> str:
    """Return a summary of the tiles in three short lines."""
    kinds, load = picture.kinds, picture.computed
    return (
        f"{kinds.size - picture.count(SKIP)} of {kinds.size} tiles computed:\n"
        f"{picture.overhead:.2f} × the visible scores;\n"
        f"busiest rank {load.max() / load.mean():.2f} × the mean"
    )


def _sentence(picture: Tiles) -> str:
    runs = picture.layout.runs(0)
    first = picture.layout.positions(0)[:4].tolist()
    busy = picture.computed
    return (
        f"{picture.layout.name}: rank 0 owns {picture.layout.length(0)} tokens in {len(runs)} "
        f"run{'s' * (len(runs) != 1)}, first {', '.join(map(str, first))}; {picture.count(FULL)} tiles full, "
        f"{picture.count(PARTIAL)} partly masked, {picture.count(SKIP)} skipped; "
        f"{picture.overhead:.2f} scores computed for each visible one; "
        f"the busiest rank computes {busy.max():,}, the idlest {busy.min():,}."
    )


def _draw_documents(ax: Axes, layout: Layout, documents: Sequence[int] | None, named: bool) -> None:
    """Draw a flag where each packed document begins."""
    if documents is None:
        return
    for number, begin in enumerate(np.cumsum([0, *documents[:-1]])):
        ax.plot((begin, begin), (-0.72, 0.5), color=INK, linewidth=1.6, clip_on=False)
        if named and documents[number] / layout.S * 6.6 * 72 >= 44:
            offset: Any = {"xytext": (3, 3), "textcoords": "offset points", "fontsize": 7.5, "color": QUIET}
            ax.annotate(f"document {number}", (begin, -0.5), **offset)


def _plate() -> dict[str, Any]:
    """Return the style of text with a background, for a strip whose pieces are too thin to be shown."""
    plate = {"facecolor": PAPER, "edgecolor": QUIET, "boxstyle": "round,pad=0.25", "linewidth": 0.8}
    return {"ha": "center", "va": "center", "fontsize": 8, "color": INK, "bbox": plate}


def _legend(drawn: Any, pictures: Sequence[Tiles]) -> None:
    from matplotlib.lines import Line2D

    there = {kind for picture in pictures for kind in (SKIP, PARTIAL, FULL) if picture.count(kind)}
    handles: list[Any] = [
        panel.patch(label=WORDS[kind], **look) for kind, look in LOOKS.items() if kind in there
    ]
    handles.append(Line2D([], [], color=INK, linewidth=1.1, label="edge between ranks"))
    drawn.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5)
