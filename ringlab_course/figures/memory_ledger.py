"""The memory ledger: the bytes of each tensor of one attention layer, by sequence length S.

The numbers come from formulas; matplotlib and ipywidgets are imported only when a picture is drawn. Memory is
in bytes, and a GB is 1e9 bytes. Three smaller pictures show the shapes of one head's arrays, the query heads
that share a key/value head, and the measured peaks of a ring and an all-gather.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringlab.viz.frontend import import_widgets, show_player
from ringlab.viz.style import (
    BLUE,
    GREEN,
    HATCHES,
    INK,
    ORANGE,
    PAPER,
    QUIET,
    RED,
    RULE,
    SKY,
    as_html,
    new_figure,
    rank_colour,
    styled,
)
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GB = 10**9
COLOURS = {"q": SKY, "k and v": GREEN, "scores": RED, "weights": ORANGE, "out": BLUE}
POWERS = range(4, 25)
"""The figure's S axis: 2^4 to 2^24 tokens."""
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float8": 1}


@dataclass(frozen=True)
class Layer:
    """One attention layer: H query heads, K key/value heads, head dim D, bytes per element."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    itemsize: int = 2
    batch: int = 1

    def ledger(self, S: int) -> dict[str, int]:
        """Return the bytes of every tensor that naive attention holds at once for a sequence of S tokens."""
        vectors = self.batch * S * self.head_dim * self.itemsize
        matrix = self.batch * self.heads * S * S * self.itemsize
        return {
            "q": self.heads * vectors,
            "k and v": 2 * self.kv_heads * vectors,
            "scores": matrix,
            "weights": matrix,
            "out": self.heads * vectors,
        }

    def flops(self, S: int) -> int:
        """Return the FLOP of the two matrix products, without a mask: 4·B·H·S²·D."""
        return 4 * self.batch * self.heads * S * S * self.head_dim

    def largest_sequence(self, memory: int) -> int:
        """Return the largest S whose whole ledger fits into `memory` bytes.

        The ledger is a·S² + b·S with a = 2·B·H·itemsize and b = 2·(H + K)·B·D·itemsize.
        """
        square = 2 * self.batch * self.heads * self.itemsize
        linear = 2 * (self.heads + self.kv_heads) * self.batch * self.head_dim * self.itemsize
        return (math.isqrt(linear**2 + 4 * square * memory) - linear) // (2 * square)


def kv_cache_bytes(tokens: int, *, layers: int, kv_heads: int, head_dim: int, itemsize: int = 2) -> int:
    """Return the bytes of the keys AND values of `tokens` tokens in all layers.

    These are 2·layers·K·D·itemsize per token.
    """
    return 2 * layers * kv_heads * head_dim * itemsize * tokens


def readable(count: float) -> str:
    """Return a number of bytes as a short text with a decimal unit.

    >>> readable(327_680_000_000)
    '328 GB'
    """
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if count < 999.5 or unit == "PB":
            break
        count /= 1000
    return f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"


def draw_curves(ax: Axes, layer: Layer, memory: int, S: int) -> None:
    """Draw bytes against S on logarithmic axes, with the memory of one device and the chosen S."""
    tokens = [2**power for power in POWERS]
    for name, style, label in (
        ("scores", "-", "scores; weights the same: ∝ S²"),
        ("q", "--", "q; out the same: ∝ S"),
        ("k and v", ":", "k and v together: ∝ S"),
    ):
        ax.plot(tokens, [layer.ledger(n)[name] for n in tokens], style, color=COLOURS[name], label=label)
    ax.plot(tokens, [sum(layer.ledger(n).values()) for n in tokens], color=QUIET, label="all five together")
    ax.axhline(memory, color=INK, linewidth=1.2)
    ax.text(tokens[0], memory / 1.4, f"one device: {readable(memory)}", va="top", color=INK, fontsize=9)
    full = layer.largest_sequence(memory)
    ax.plot([full], [memory], "o", color=INK, markersize=7)
    ax.annotate(
        f"the wall:\n{full:,} tokens",
        (full, memory),
        (-6, 7),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=9,
        fontweight="bold",
        color=INK,
    )
    ax.axvline(S, color=QUIET, linewidth=1, linestyle=(0, (2, 2)), label=f"S = {thousands(S)}, shown right")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks([2**power for power in POWERS[::4]], [thousands(2**power) for power in POWERS[::4]])
    ax.set(
        title="Bytes of one attention layer",
        xlabel="S (tokens, 1k = 1,024), logarithmic",
        ylabel="bytes, logarithmic",
    )
    ax.set_ylim(top=layer.ledger(tokens[-1])["scores"] * 10)
    ax.yaxis.set_major_formatter(lambda value, _: readable(value))


def draw_bars(ax: Axes, layer: Layer, memory: int, S: int) -> None:
    """Draw the ledger of one S as bars, and the memory of one device if it is within the axis."""
    from matplotlib.ticker import MaxNLocator

    books = layer.ledger(S)
    right = 1.35 * max(books.values())
    for row, (name, count) in enumerate(books.items()):
        ax.barh(row, count, color=COLOURS[name], hatch="//" if count > memory else "", edgecolor="white")
        past = memory if count < memory < right else count  # the black line must not cross the text
        ax.text(past + 0.02 * right, row, _measure(count, right), va="center", fontsize=9)
    if memory < right:
        ax.axvline(memory, color=INK, linewidth=1.2)
    place = "black line" if memory < right else "beyond this axis"
    hatched = "\nhatched: more than one device" if max(books.values()) > memory else ""
    ax.set_xlim(0, right)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(lambda value, _: readable(value))
    ax.set_yticks(range(len(books)), list(books))
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.set(
        title=f"Each tensor at S = {thousands(S)}",
        xlabel=f"bytes (one device, {readable(memory)}: {place}){hatched}",
    )


def _measure(count: int, right: float) -> str:
    """Return the label of a bar; for a bar that is too short to be seen, the label says so."""
    return readable(count) if count > 0.004 * right else f"{readable(count)}, bar too short to see"


def ledger_figure(S: int = 131_072, layer: Layer | None = None, memory: int = 80 * GB) -> Figure:
    """Return the curves against S, with the ledger of one S."""
    layer = layer or Layer()
    with styled():
        figure = new_figure((9.6, 4.6))
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        draw_curves(left, layer, memory, S)
        draw_bars(right, layer, memory, S)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", fontsize=9, ncols=3)
    return figure


def describe(S: int = 131_072, layer: Layer | None = None, memory: int = 80 * GB) -> str:
    """Return the ledger in words: the alternative text of `ledger_figure`."""
    layer = layer or Layer()
    books, most = layer.ledger(S), layer.largest_sequence(memory)
    items = ", ".join(f"{name} {readable(count)}" for name, count in books.items())
    fits = "fits into" if S <= most else "does not fit into"
    return (
        f"At S = {S:,} tokens one layer takes {readable(sum(books.values()))} and {fits} a device of {readable(memory)}; "
        f"the largest S that fits is {most:,}. {layer.heads} query heads, {layer.kv_heads} key/value heads, head dim "
        f"{layer.head_dim}, {layer.itemsize} bytes per element: {items}."
    )


def explorer(memory: int = 80 * GB) -> Any:
    """Return a widget with sliders for S and the query heads, and buttons for the dtype."""
    ipywidgets = import_widgets()

    S = ipywidgets.SelectionSlider(
        options=[(thousands(2**p), 2**p) for p in POWERS], value=2**17, description="S (tokens)"
    )
    heads = ipywidgets.SelectionSlider(options=[8, 16, 32, 64, 128], value=32, description="heads")
    dtype = panel.buttons([*ITEMSIZE])
    dtype.value = "bfloat16"

    def draw() -> str:
        layer = Layer(heads=heads.value, itemsize=ITEMSIZE[dtype.value])
        return as_html(ledger_figure(S.value, layer, memory), describe(S.value, layer, memory))

    return ipywidgets.VBox([ipywidgets.HBox([S, heads]), dtype, panel.moved_by(draw, S, heads, dtype)])


def explore(memory: int = 80 * GB) -> None:
    """Show the explorer if a person can use it; otherwise print the ledger in words."""
    show_player(lambda: explorer(memory), lambda: print(describe(memory=memory)))


def thousands(tokens: int) -> str:
    """Return a number of tokens with a binary unit, as people say it.

    >>> thousands(131_072), thousands(2**20)
    ('128k', '1M')
    """
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if tokens >= size:
            return f"{tokens / size:g}{letter}"
    return str(tokens)


def shapes_figure(ratio: int = 5) -> Figure:
    """Return a picture of the arrays of one head, in the order of attention, to scale for S = `ratio` · D."""
    S, D = float(ratio), 1.0
    arrays = (
        ("q", (S, D), "q", "", "@", 0.9),
        ("kᵀ", (D, S), "k and v", "", "/ √D  =", 1.8),
        (
            "scores",
            (S, S),
            "scores",
            "one row\nper query,\none column\nper key",
            "softmax\nof each\nrow  →",
            2.1,
        ),
        ("weights", (S, S), "weights", "each row\nadds up to 1", "@", 0.9),
        ("v", (S, D), "k and v", "", "=", 0.9),
        ("out", (S, D), "out", "", "", 0.0),
    )
    with styled():
        figure = new_figure((9.6, 3.5))
        ax = figure.subplots()
        ax.set_axis_off()
        x, title = 0.0, "One head of attention: two products, with a softmax between them"
        for name, shape, colour, inside, sign, space in arrays:
            _array(ax, x, S, shape, name, COLOURS[colour])
            ink = PAPER if name == "scores" else INK
            ax.text(x + S / 2, S / 2, inside, ha="center", va="center", fontsize=9.5, color=ink)
            ax.text(x + shape[1] + space / 2, S / 2, sign, ha="center", va="center", color=INK)
            x += shape[1] + space
        ax.text(-0.2, -1.5, title, fontsize=11.5, weight="bold", va="center", color=INK)
        words = f"Areas to scale for S = {ratio} · D. If the text doubles, both squares become four times as large."
        ax.text(-0.2, S + 1.3, words, fontsize=9.5, va="center", color=QUIET)
        ax.set(xlim=(-0.5, x + 0.3), ylim=(S + 1.8, -1.9), aspect="equal")
    return figure


def describe_shapes(ratio: int = 5) -> str:
    """Return the picture of `shapes_figure` in words."""
    return (
        f"One head of attention, areas to scale for S = {ratio} D. q, S × D, times k transposed, D × S, gives the "
        "scores, S × S. The softmax of each row gives the weights, S × S. The weights times v, S × D, give out, S × D. "
        "The two squares are by far the largest."
    )


def _array(ax: Axes, x: float, S: float, shape: tuple[float, float], name: str, colour: str) -> None:
    """Draw an array of `shape` (rows, columns), with name and shape, in the middle of a band of height S."""
    (rows, columns), top = shape, (S - shape[0]) / 2
    panel.add_rectangle(ax, (x, top), columns, rows, facecolor=colour, edgecolor=INK, linewidth=1)
    ax.text(x + columns / 2, top - 0.4, name, ha="center", va="center", weight="bold", color=INK)
    letters = {S: "S"}
    words = f"{letters.get(rows, 'D')} × {letters.get(columns, 'D')}"
    ax.text(x + columns / 2, top + rows + 0.45, words, ha="center", va="center", fontsize=9.5, color=INK)


def sharing_figure(heads: int = 8, kv_heads: int = 2) -> Figure:
    """Return a picture of the key/value head that each query head meets after np.repeat and np.tile."""
    orders = _orders(heads, kv_heads)
    with styled():
        figure = new_figure((7.6, 2.5))
        ax = figure.subplots()
        ax.set_axis_off()
        ax.set(xlim=(-1.9, heads), ylim=(3.1, -1.3))
        title = "The key/value head that each query head meets"
        ax.text(-1.85, -1.0, title, fontsize=11.5, weight="bold", va="center", color=INK)
        ax.text(-0.15, -0.2, "query head", ha="right", va="center", fontsize=9.5, color=INK)
        for head in range(heads):
            ax.text(head + 0.45, -0.2, str(head), ha="center", va="center", fontsize=9.5, color=INK)
        for y, (name, order) in zip((0.2, 1.5), orders.items(), strict=True):
            ax.text(-0.15, y + 0.45, name, ha="right", va="center", weight="bold", color=INK)
            for head, kv_head in enumerate(order):
                is_right = kv_head == orders["np.repeat"][head]
                box = panel.rectangle((head, y), 0.9, 0.9, facecolor=rank_colour(kv_head), edgecolor="white")
                box.set_hatch(HATCHES[kv_head % 8])
                ax.add_patch(box)
                ax.text(
                    head + 0.45, y + 0.45, str(kv_head), ha="center", va="center", weight="bold", color=INK,
                    bbox={"facecolor": "white", "edgecolor": "none", "boxstyle": "circle,pad=0.2"},
                )  # fmt: skip
                if name == "np.tile":
                    ax.text(head + 0.45, 2.65, "✓" if is_right else "✗", ha="center", va="center", color=INK)
        ax.text(-0.15, 2.65, "right?", ha="right", va="center", fontsize=9.5, color=INK)
    return figure


def describe_sharing(heads: int = 8, kv_heads: int = 2) -> str:
    """Return the picture of `sharing_figure` in words."""
    orders = _orders(heads, kv_heads)
    rows = [f"{name}: {', '.join(map(str, order))}" for name, order in orders.items()]
    agree = [head for head in range(heads) if len({order[head] for order in orders.values()}) == 1]
    return (
        f"The key/value head that each of {heads} query heads meets. {'. '.join(rows)}. "
        f"They agree for the query heads {', '.join(map(str, agree))}."
    )


def _orders(heads: int, kv_heads: int) -> dict[str, list[int]]:
    group = heads // kv_heads
    return {
        "np.repeat": [head // group for head in range(heads)],
        "np.tile": [head % kv_heads for head in range(heads)],
    }


Peaks = Mapping[str, Mapping[int, tuple[float, int]]]
"""By schedule and number of ranks: a rank's peak in K/V blocks, and how many are other ranks' blocks."""


def peaks_figure(peaks: Peaks, tokens: int) -> Figure:
    """Return measured peaks as bars by number of ranks, split into other ranks' blocks and the rest."""
    looks = {
        name: (colour, hatch) for name, colour, hatch in zip(peaks, (SKY, ORANGE), ("", "//"), strict=True)
    }
    with styled():
        figure = new_figure((7.2, 3.6))
        ax = figure.subplots()
        handles = [panel.patch(facecolor=RULE, edgecolor=QUIET, label="all the rest")]
        for side, (name, bars) in enumerate(peaks.items()):
            colour, hatch = looks[name]
            for place, (peak, others) in enumerate(bars.values()):
                x = place + 0.4 * (side - 0.5)
                ax.bar(x, peak - others, 0.34, color=RULE, edgecolor=QUIET)
                ax.bar(x, others, 0.34, bottom=peak - others, color=colour, hatch=hatch, edgecolor=INK)
                ax.text(x, peak + 0.3, f"{peak:.0f}", ha="center", fontsize=9.5)
            label = f"{name}: K/V blocks of other ranks"
            handles.insert(side, panel.patch(facecolor=colour, hatch=hatch, edgecolor=INK, label=label))
        ranks = list(next(iter(peaks.values())))
        ax.set_xticks(range(len(ranks)), [f"{count} ranks" for count in ranks])
        ax.set(
            ylabel="peak of a rank (K/V blocks)",
            ylim=(0, 1.1 * max(p for b in peaks.values() for p, _ in b.values())),
        )
        ax.set_title(f"Peak memory with {tokens} tokens on every rank", fontsize=11)
        ax.grid(visible=False, axis="x")
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)
    return figure


def describe_peaks(peaks: Peaks, tokens: int) -> str:
    """Return the peaks in words: the alternative text of `peaks_figure`."""
    lines = (
        f"{name}: "
        + ", ".join(
            f"{peak:.0f} on {ranks} ranks, {others} of them of other ranks"
            for ranks, (peak, others) in bars.items()
        )
        for name, bars in peaks.items()
    )
    return f"Peak memory in K/V blocks of {tokens} tokens. {'. '.join(lines)}."
