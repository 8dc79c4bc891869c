"""Pictures of documents that are packed in one row, which several ranks share.

A row is drawn as a strip of its tokens. The colour of a token shows its document, and a gap in the strip is a border
between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.layout import Layout
from ringlab.packing import Packing
from ringlab.viz.style import (
    BLUE,
    GREEN,
    INK,
    PAPER,
    PURPLE,
    QUIET,
    RED,
    SKY,
    YELLOW,
    new_figure,
    styled,
)
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOCUMENT_COLOURS = (SKY, YELLOW, PURPLE, GREEN)
_LOWER, _WRONG = "#DCE9F5", "#FBE3D6"
GAP = 0.45
"""The width of the gap between two ranks, in tokens."""


def strip(
    packing: Packing,
    layout: Layout,
    letters: Sequence[str],
    lines: Mapping[str, Sequence[object] | np.ndarray] | None = None,
    wrong: Mapping[str, np.ndarray] | None = None,
    lower: Mapping[str, np.ndarray] | None = None,
    *,
    title: str,
    bounds: bool = False,
) -> Figure:
    """Return the row as a strip, with lines of text under it.

    lines: a text or a number for each token, by the name of the line.
    wrong[name]: (S,), bool, True for a text of this line that is a mistake.
    lower[name]: (S,), bool, True for a number that a mistake makes lower; such numbers have another colour.
    bounds: whether a line shows cu_seqlens. If so, the texts of the first token of each document are bold.
    """
    lines = lines or {}
    marks = ((lower or {}, _LOWER, BLUE), (wrong or {}, _WRONG, RED))
    with styled():
        rows = len(lines) + bounds
        drawn = new_figure((8.0, 1.5 + 0.36 * rows + 0.3 * bool(lower)))
        ax = drawn.subplots()
        at = _draw_strip(ax, packing, layout, letters)
        if bounds:
            _draw_bounds(ax, packing, at)
        for number, (name, texts) in enumerate(lines.items(), start=int(bounds)):
            y = 1.55 + 0.85 * number
            _name(ax, name, y)
            for token, text in enumerate(texts):
                colour, weight = INK, "bold" if bounds and token in packing.cu_seqlens else "normal"
                for marked, light, dark in marks:
                    if name in marked and marked[name][token]:
                        box = (at[token] - 0.48, y - 0.4), 0.96, 0.8
                        panel.add_rectangle(ax, *box, facecolor=light, edgecolor="none")
                        colour, weight = dark, "bold" if len(str(text)) <= 4 else "normal"  # else too wide
                        break
                size = 7.5 if len(str(text)) > 4 else 8.5
                ax.text(at[token], y, str(text), color=colour, weight=weight, **_SMALL | {"fontsize": size})
        ax.set(xlim=(-0.6, max(at) + 0.7), ylim=(1.2 + 0.85 * rows, -0.95), title=title)
        changes = {"lower": _LOWER, "higher or lost": _WRONG} if lower else {}
        _explain_colours(drawn, packing, letters, changes)
    return drawn


def describe(
    packing: Packing,
    layout: Layout,
    letters: Sequence[str],
    lines: Mapping[str, Sequence[object] | np.ndarray] | None = None,
    wrong: Mapping[str, np.ndarray] | None = None,
    lower: Mapping[str, np.ndarray] | None = None,
    *,
    title: str,
    bounds: bool = False,
) -> str:
    """Return the picture of `strip` in words."""
    parts = [f"{title}.", _describe_strip(packing, layout, letters)]
    if bounds:
        parts.append(f"cu_seqlens: {', '.join(map(str, packing.cu_seqlens))}.")
    for name, texts in (lines or {}).items():
        parts.append(f"{name}: {' '.join(str(text) or 'none' for text in texts)}.")
        if wrong and name in wrong:
            parts.append(f"Wrong at places {_listed(wrong[name])}.")
        if lower and name in lower:
            parts.append(f"Lower at places {_listed(lower[name])}.")
    return " ".join(parts)


_SMALL: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8.5}


def _at(layout: Layout) -> np.ndarray:
    """Return the place where each token is drawn: rank after rank, with a gap between ranks."""
    at = np.empty(layout.S)
    begin = 0.0
    for rank in range(layout.P):
        own = layout.positions(rank)
        at[own] = begin + np.arange(len(own))
        begin += len(own) + GAP
    return at


def _draw_strip(ax: Axes, packing: Packing, layout: Layout, letters: Sequence[str]) -> np.ndarray:
    """Draw the tokens in boxes from y = 0 to 1 under the names of their ranks; return their horizontal places.

    If the ranks hold the tokens in another order than the row does, each token's place in the row is in the
    corner of its box.
    """
    at = _at(layout)
    moved = (np.diff(at) < 0).any()
    for token, document in enumerate(packing.document_ids):
        panel.add_rectangle(ax, (at[token] - 0.5, 0), 1, 1, facecolor=_colour(document), edgecolor=PAPER)
        ax.text(at[token], 0.5, letters[token], ha="center", va="center", fontsize=12, family="monospace")
        if moved:
            ax.text(at[token] + 0.43, 0.93, str(token), ha="right", va="bottom", fontsize=7.5)
    for rank in range(layout.P):
        own = at[layout.positions(rank)]
        if len(own):
            ax.plot([own.min() - 0.45, own.max() + 0.45], [-0.2] * 2, color=INK, linewidth=1.5)
            ax.text(own.mean(), -0.55, f"rank {rank}", ha="center", va="center", fontsize=9)
    ax.set(xticks=[], yticks=[])
    panel.bare(ax)
    return at


def _draw_bounds(ax: Axes, packing: Packing, at: np.ndarray) -> None:
    _name(ax, "cu_seqlens", 1.55)
    for bound in packing.cu_seqlens:
        x = at[bound] - 0.5 if bound < len(at) else at[-1] + 0.5
        ax.plot([x, x], [-0.05, 1.2], color=INK, linewidth=1.5)
        ax.text(x, 1.55, str(bound), weight="bold", **_SMALL)


def _name(ax: Axes, name: str, y: float) -> None:
    ax.text(-0.95, y, name, ha="right", va="center", fontsize=9, color=QUIET)


def _colour(document: int) -> str:
    return DOCUMENT_COLOURS[document % len(DOCUMENT_COLOURS)]


def _explain_colours(
    drawn: Figure, packing: Packing, letters: Sequence[str], more: Mapping[str, str] | None = None
) -> None:
    names = [f"document {n}: {''.join(letters[own])}" for n, own in enumerate(packing.slices)]
    colours = {name: _colour(n) for n, name in enumerate(names)} | dict(more or {})
    boxes = [panel.patch(facecolor=colour) for colour in colours.values()]
    columns = 3 if more else len(names)
    drawn.legend(boxes, list(colours), loc="outside lower center", ncols=columns, fontsize=9)


def _describe_strip(packing: Packing, layout: Layout, letters: Sequence[str]) -> str:
    words = ", ".join("".join(letters[own]) for own in packing.slices)
    held = [
        f"rank {rank}: {' '.join(letters[t] for t in layout.positions(rank))}" for rank in range(layout.P)
    ]
    return f"A row of the documents {words}, a letter a token. {'; '.join(held)}."


def _listed(which: np.ndarray) -> str:
    return ", ".join(map(str, np.flatnonzero(which))) or "none"


_PAIRS: dict[str, dict[str, Any]] = {
    "seen, rightly": {"facecolor": BLUE, "edgecolor": PAPER},
    "seen by mistake": {"facecolor": RED, "edgecolor": PAPER, "hatch": "///"},
    "lost": {"facecolor": "#B8C0C9", "edgecolor": INK},
}
"""The looks of a pair that is rightly seen, one that is wrongly seen, and one that is wrongly not seen."""


def pairs(
    packing: Packing,
    layout: Layout,
    letters: Sequence[str],
    seen: Mapping[str, np.ndarray],
    framed: int | None = None,
) -> Figure:
    """Return a picture of which query sees which key: a grid for each entry of `seen`, (S, S), of bool.

    The row lies along both sides of a grid. Heavy lines are the borders of ranks, whose shards are contiguous.
    The query at the place `framed` gets a frame.
    """
    with styled():
        drawn = new_figure((8.0, 4.6))
        axes = drawn.subplots(1, len(seen), squeeze=False)[0]
        for ax, (title, given) in zip(axes, seen.items(), strict=True):
            for kind, where in _kinds(packing, given).items():
                for query, key in np.argwhere(where):
                    panel.add_rectangle(ax, (key - 0.5, query - 0.5), 1, 1, linewidth=0.5, **_PAIRS[kind])
            _draw_sides(ax, packing, layout, letters)
            if framed is not None:
                look: dict[str, Any] = {"facecolor": "none", "edgecolor": INK, "linewidth": 2.8}
                panel.add_rectangle(ax, (-1.7, framed - 0.5), packing.length + 1.2, 1, zorder=6, **look)
            ax.set_title(title)
        axes[0].set_ylabel("query")
        kinds = [
            kind for kind in _PAIRS if any(_kinds(packing, given)[kind].any() for given in seen.values())
        ]
        boxes = [panel.patch(linewidth=0.5, **_PAIRS[kind]) for kind in kinds]
        drawn.legend(boxes, kinds, loc="outside lower center", ncols=len(kinds), fontsize=9)
    return drawn


def describe_pairs(
    packing: Packing,
    layout: Layout,
    letters: Sequence[str],
    seen: Mapping[str, np.ndarray],
    framed: int | None = None,
) -> str:
    """Return the picture of `pairs` in words."""
    parts = [_describe_strip(packing, layout, letters)]
    if framed is not None:
        parts.append(f"The query {letters[framed]} at place {framed} has a frame.")
    for title, given in seen.items():
        counts = [f"{int(where.sum())} pairs {kind}" for kind, where in _kinds(packing, given).items()]
        parts.append(f"{title}: {', '.join(counts)}.")
    return " ".join(parts)


def _right(packing: Packing) -> np.ndarray:
    places = np.arange(packing.length)
    return np.asarray(packing.mask().visible(places, places))


def _kinds(packing: Packing, given: np.ndarray) -> dict[str, np.ndarray]:
    right = _right(packing)
    return dict(zip(_PAIRS, (right & given, given & ~right, right & ~given), strict=True))


def _draw_sides(ax: Axes, packing: Packing, layout: Layout, letters: Sequence[str]) -> None:
    """Draw the row along the left and the upper side of a grid, and the borders across it."""
    S = layout.S
    for token, document in enumerate(packing.document_ids):
        for x, y in ((token, -1.2), (-1.2, token)):
            panel.add_rectangle(ax, (x - 0.5, y - 0.5), 1, 1, facecolor=_colour(document), edgecolor=PAPER)
            ax.text(x, y, letters[token], ha="center", va="center", fontsize=9, family="monospace")
    for bound in packing.cu_seqlens[1:-1] - 0.5:
        ax.plot([bound, bound], [-0.5, S - 0.5], color=QUIET, linewidth=0.8, linestyle=":")
        ax.plot([-0.5, S - 0.5], [bound, bound], color=QUIET, linewidth=0.8, linestyle=":")
    for rank in range(layout.P):
        own = layout.positions(rank)
        ax.text(own.mean(), -2.3, f"rank {rank}", ha="center", va="center", fontsize=8.5)
        ax.text(-2.3, own.mean(), f"rank {rank}", ha="center", va="center", fontsize=8.5, rotation=90)
        for edge in {own[0] - 0.5, own[-1] + 0.5}:
            ax.plot([edge, edge], [-1.9, S - 0.5], color=INK, linewidth=1.4)
            ax.plot([-1.9, S - 0.5], [edge, edge], color=INK, linewidth=1.4)
    ax.set(xlim=(-3.0, S - 0.3), ylim=(S - 0.3, -3.0), aspect="equal", xticks=[], yticks=[])
    ax.set_xlabel("key")
    ax.xaxis.set_label_position("bottom")
    panel.bare(ax)


def labels(
    packing: Packing, layouts: Mapping[str, Layout], letters: Sequence[str], made: Mapping[str, np.ndarray]
) -> Figure:
    """Return a strip for each title, with an arrow from each token to its label.

    layouts[title]: how the ranks share the row. made[title]: (S,), the place of each token's label under that
    layout, negative if the token has none.
    """
    with styled():
        drawn = new_figure((8.0, 1.55 * len(made) + 0.7))
        axes = drawn.subplots(len(made), 1, squeeze=False)[:, 0]
        right = _next_places(packing)
        for ax, (title, own) in zip(axes, made.items(), strict=True):
            at = _draw_strip(ax, packing, layouts[title], letters)
            for token, place in enumerate(own):
                _draw_label(ax, at, token, int(place), int(right[token]))
            ax.set(xlim=(-0.6, max(at) + 0.7), ylim=(2.3, -0.95))
            ax.set_title(title, fontsize=10.5)
        _explain_labels(drawn, _label_kinds(right, made.values()))
    return drawn


def _draw_label(ax: Axes, at: np.ndarray, token: int, place: int, right: int) -> None:
    """Draw an arrow from a token to its label, one that ends in a cross if the label is lost, or a dot if it should have no label."""
    if place >= 0:
        wrong = place != right
        look: dict[str, Any] = {"color": RED if wrong else QUIET, "linewidth": 2.2 if wrong else 1.1}
        arrow = {"arrowstyle": "-|>", "connectionstyle": "arc3,rad=0.55", "shrinkA": 0, "shrinkB": 0, **look}
        ax.annotate("", xy=(at[place], 1.1), xytext=(at[token], 1.1), arrowprops=arrow, annotation_clip=False)
    elif right >= 0:
        stub = {"arrowstyle": "-", "connectionstyle": "arc3,rad=0.3", "shrinkA": 0, "shrinkB": 0}
        end, look = (at[token] + 0.62, 1.55), {"color": RED, "linewidth": 1.4}
        ax.annotate("", xy=end, xytext=(at[token], 1.1), arrowprops=stub | look, annotation_clip=False)
        ax.plot(*end, marker="x", color=RED, markersize=8, markeredgewidth=2.5)
    else:
        ax.plot(at[token], 1.75, marker="o", color=QUIET, markersize=4)


def _label_kinds(right: np.ndarray, made: Iterable[np.ndarray]) -> list[bool]:
    """Return whether these cases occur: a right label, a wrong label, a lost label, and rightly no label."""
    kinds = [
        (
            (own >= 0) & (own == right),
            (own >= 0) & (own != right),
            (own < 0) & (right >= 0),
            (own < 0) & (right < 0),
        )
        for own in made
    ]
    return [any(where.any() for where in kind) for kind in zip(*kinds, strict=True)]


def _explain_labels(drawn: Figure, occurs: Sequence[bool]) -> None:
    from matplotlib.lines import Line2D

    looks = {
        "from a token to its label": Line2D([], [], color=QUIET, linewidth=1.1),
        "to a wrong label": Line2D([], [], color=RED, linewidth=2.2),
        "the token has lost its label": Line2D(
            [], [], color=RED, marker="x", linestyle="", markersize=8, markeredgewidth=2.5
        ),
        "rightly no label": Line2D([], [], color=QUIET, marker="o", linestyle="", markersize=4),
    }
    shown = {name: look for (name, look), wanted in zip(looks.items(), occurs, strict=True) if wanted}
    drawn.legend(shown.values(), shown, loc="outside lower center", ncols=3, fontsize=9)


def _next_places(packing: Packing) -> np.ndarray:
    """Return the place of each token's right label: the next place in its document, or −1."""
    places = np.arange(1, packing.length + 1)
    places[packing.cu_seqlens[1:] - 1] = -1
    return places


def describe_labels(
    packing: Packing, layouts: Mapping[str, Layout], letters: Sequence[str], made: Mapping[str, np.ndarray]
) -> str:
    """Return the picture of `labels` in words."""
    right = _next_places(packing)
    parts = []
    for title, own in made.items():
        lost, wrong = (own < 0) & (right >= 0), (own >= 0) & (own != right)
        parts.append(_describe_strip(packing, layouts[title], letters))
        parts.append(
            f"{title}. Labels lost at places {_listed(lost)}; wrong labels at places {_listed(wrong)}."
        )
    return " ".join(parts)


def weights(
    packing: Packing,
    layout: Layout,
    letters: Sequence[str],
    given: Mapping[str, np.ndarray],
    *,
    shares: bool = False,
) -> Figure:
    """Return a picture of the strip and, above it, a line of bars for each title: the tokens' weights in the mean.

    shares: whether a bracket over each document has the sum of its weights. The layout must be contiguous.
    """
    with styled():
        drawn = new_figure((8.0, (1.2 + 0.3 * shares) * len(given) + 1.5))
        axes = drawn.subplots(len(given) + 1, 1, height_ratios=[1.0] * len(given) + [0.85])
        drawn.set_layout_engine("constrained", h_pad=0.12)
        at = _draw_strip(axes[-1], packing, layout, letters)
        axes[-1].set(xlim=(-0.6, max(at) + 0.7), ylim=(1.05, -0.95))
        highest = max(each.max() for each in given.values())
        for ax, (title, each) in zip(axes, given.items(), strict=False):
            ax.bar(
                at,
                each,
                width=0.9,
                color=[_colour(n) for n in packing.document_ids],
                edgecolor=QUIET,
                linewidth=0.6,
            )
            for x, weight in zip(at, each, strict=True):
                ax.text(x, weight + 0.04 * highest, _fraction(weight), ha="center", va="bottom", fontsize=8.5)
            if shares:
                _draw_shares(ax, packing, at, each, highest)
            top = (1.9 if shares else 1.35) * highest
            ax.set(xlim=(-0.6, max(at) + 0.7), ylim=(0, top), xticks=[], yticks=[])
            ax.set_title(title, fontsize=10.5)
            ax.grid(visible=False)
            ax.spines["left"].set_visible(False)
        _explain_colours(drawn, packing, letters)
    return drawn


def _draw_shares(ax: Axes, packing: Packing, at: np.ndarray, each: np.ndarray, highest: float) -> None:
    """Draw a bracket over each document that has any weight, with the sum of its weights."""
    y = 1.45 * highest
    for own in packing.slices:
        if each[own].sum():
            left, right = at[own].min() - 0.4, at[own].max() + 0.4
            foot = y - 0.06 * highest
            ax.plot([left, left, right, right], [foot, y, y, foot], color=INK, linewidth=1.2)
            look: dict[str, Any] = _SMALL | {"va": "bottom", "fontsize": 10, "weight": "bold"}
            ax.text((left + right) / 2, y, _fraction(each[own].sum()), **look)


def _fraction(weight: float) -> str:
    return str(Fraction(float(weight)).limit_denominator(1000))


def describe_weights(
    packing: Packing,
    layout: Layout,
    letters: Sequence[str],
    given: Mapping[str, np.ndarray],
    *,
    shares: bool = False,
) -> str:
    """Return the picture of `weights` in words."""
    parts = [_describe_strip(packing, layout, letters)]
    for title, each in given.items():
        parts.append(f"{title}. The tokens' weights: {' '.join(map(_fraction, each))}.")
        if shares:
            sums = [_fraction(each[own].sum()) for own in packing.slices]
            parts.append(f"Sums of the documents: {' '.join(sums)}.")
    return " ".join(parts)
