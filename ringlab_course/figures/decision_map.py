"""The decision map: the schedule that exposes the least communication, by tokens per rank and bandwidth.

The horizontal axis is the number of tokens per rank, the vertical axis the bandwidth of a link. The rules are
in `ringlab_course.figures.decision_rules`. To the right of the heavy line, the ring's hops are hidden
(`ringlab.cost.traffic.least_tokens_hidden`). Bandwidth is in bytes per second in one direction.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.cost import units
from ringlab.cost.choose import ways
from ringlab.cost.hardware import Hardware, hardware
from ringlab.cost.sizes import Attention
from ringlab.viz.frontend import import_widgets, show_player
from ringlab.viz.style import (
    BLUE,
    GREEN,
    INK,
    PAPER,
    PURPLE,
    RED,
    RULE,
    SKY,
    YELLOW,
    as_html,
    new_figure,
    show,
    styled,
)
from ringlab_course.figures import panel
from ringlab_course.figures.decision_rules import (
    ALLGATHER,
    BANDWIDTH,
    HIDDEN,
    HYBRID,
    NOTHING,
    RING,
    TOKENS,
    ULYSSES,
    Question,
    grid,
    question,
)
from ringlab_course.figures.labels import middle, room_for
from ringlab_course.figures.papers import MACHINES, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {HIDDEN: SKY, RING: BLUE, ULYSSES: GREEN, HYBRID: YELLOW, ALLGATHER: PURPLE, NOTHING: RULE}
WORDS = {
    HIDDEN: "ring: nothing exposed",
    RING: "ring: a little exposed",
    ULYSSES: "Ulysses",
    HYBRID: "hybrid",
    ALLGATHER: "all-gather",
    NOTHING: "nothing fits",
}


ALPHA = 0.6
"""The opacity of the colours in the map."""
Points = Mapping[str, tuple[int, float]]
"""Named points to mark: tokens per rank, and bytes per second in one direction."""
AXES = (7.0, 3.3)
"""The approximate width and height of the map, in inches."""


def figure(
    sizes: Attention | None = None,
    machine: str | Hardware = "h100",
    P: int = 8,
    latency_s: float | None = None,
    memory_bytes: float | None = None,
    hybrids: bool = False,
    points: Points | None = None,
) -> Figure:
    """Return the map for P ranks of `machine`, which compute at the rate that its attention kernels reach.

    By default, the latency is that of the machine's inner link, and one layer's attention may use the
    machine's whole memory. With `hybrids`, rings of Ulysses rows are also compared. `points` are marked with
    their names.
    Raises: CostError for fewer than two ranks, an unknown machine, or a dtype in which the machine cannot
    compute.
    """
    asked = question(sizes, machine, P, latency_s, memory_bytes, hybrids)
    own = machine if isinstance(machine, Hardware) else hardware(machine)
    with styled():
        drawn = new_figure((8.0, 4.3))
        ax = drawn.subplots()
        draw_regions(ax, asked)
        _draw_points(ax, points or {})
        ax.set_title(
            f"Right of the heavy line a ring is free: its hops are hidden\n{_title(asked, own)}",
            fontsize=10.5,
        )
    return drawn


def draw_regions(ax: Axes, asked: Question) -> None:
    """Draw the region of each schedule, with its name, and the threshold."""
    tokens, rates, best = grid(asked)
    for kind, colour in COLOURS.items():
        here = best == kind
        if not here.any():
            continue
        ax.contourf(tokens, rates, np.where(here, 1.0, 0.0), levels=[0.5, 1.5], colors=[colour], alpha=ALPHA)
        if kind == HYBRID:
            _draw_rows(ax, asked)
        elif (place := room_for(WORDS[kind], here, *AXES)) is not None:
            _write(ax, WORDS[kind], float(tokens[place[0]]), float(rates[place[1]]))
        elif (place := room_for(WORDS[kind], here.T, *AXES[::-1])) is not None:
            _write(ax, WORDS[kind], float(tokens[place[1]]), float(rates[place[0]]), rotation=90)
        else:
            _point_out(ax, WORDS[kind], here, asked)
    ax.plot([asked.threshold(float(B)) for B in rates], rates, color=INK, linewidth=2.2)
    ax.set(xscale="log", yscale="log", xlim=TOKENS, ylim=BANDWIDTH)
    ticks = [2**power for power in range(5, 24, 3)]
    ax.set_xticks(ticks, [_tokens(tick) for tick in ticks])
    ax.tick_params(labelbottom=True)
    ax.set_yticks([1e8, 1e9, 1e10, 1e11, 1e12], ["100 MB/s", "1 GB/s", "10 GB/s", "100 GB/s", "1 TB/s"])
    ax.minorticks_off()
    ax.tick_params(labelsize=9)
    impossible = "\nUlysses: P ranks cannot share these heads" if asked.ulysses_refusal else ""
    ax.set_xlabel(f"tokens per rank (k = 2¹⁰, M = 2²⁰){impossible}", fontsize=9.5)
    ax.set_ylabel("bandwidth, one way")
    ax.grid(visible=False)


def rows(asked: Question) -> np.ndarray:
    """Return the row length U of the best hybrid at each point of the grid, or 0 if no hybrid is best."""
    tokens, rates, best = grid(asked)
    hybrids = [it for it in ways(asked.sizes, asked.P) if it.schedule == "hybrid"]
    found = np.zeros_like(best)
    for row, column in np.argwhere(best == HYBRID):
        c, B = int(tokens[column]), float(rates[row])
        fitting = [it for it in hybrids if it.held_bytes * c <= asked.memory_bytes]
        found[row, column] = min(fitting, key=lambda it: it.exposed_s(c, asked.F, B, asked.latency_s)).ulysses
    return found


def _draw_rows(ax: Axes, asked: Question) -> None:
    """Write the best U into the hybrids' region, and separate its values by thin lines."""
    tokens, rates, _ = grid(asked)
    there = rows(asked)
    degrees, counts = np.unique(there[there > 0], return_counts=True)
    by_degree = {it.ulysses: it for it in ways(asked.sizes, asked.P) if it.schedule == "hybrid"}
    for one, other in itertools.pairwise(int(U) for U in degrees):
        gains = [
            [
                by_degree[one].exposed_s(float(c), asked.F, float(B), asked.latency_s)
                - by_degree[other].exposed_s(float(c), asked.F, float(B), asked.latency_s)
                for c in tokens
            ]
            for B in rates
        ]
        border = np.ma.masked_where(~np.isin(there, (one, other)), gains)
        ax.contour(tokens, rates, border, levels=[0.0], colors=[INK], linewidths=0.9)
    for U in degrees:
        long = f"{WORDS[HYBRID]} of rows of {U}"
        place = room_for(long, there == U, *AXES) if U == degrees[counts.argmax()] else None
        if place is not None:
            _write(ax, long, float(tokens[place[0]]), float(rates[place[1]]))
        elif (strip := middle(there == U)) is not None:
            _write(ax, str(U), float(tokens[strip[0]]), float(rates[strip[1]]), small=True)


def _point_out(ax: Axes, words: str, here: np.ndarray, asked: Question) -> None:
    """Write a region's name beside the region, which is too narrow for it, and connect the two by a line."""
    tokens, rates, _ = grid(asked)
    rows = np.flatnonzero(here.any(axis=1))
    row = int(rows[len(rows) // 4])
    column = int(np.median(np.flatnonzero(here[row])))
    plate = {"facecolor": PAPER, "edgecolor": "none", "boxstyle": "round,pad=0.25"}
    side = -1 if column > len(tokens) / 2 else 1
    ax.annotate(
        words,
        (float(tokens[column]), float(rates[row])),
        xytext=(side * 60, 0),
        textcoords="offset points",
        ha="right" if side < 0 else "left",
        va="center",
        fontsize=9.5,
        fontweight="bold",
        bbox=plate,
        zorder=6,
        arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 1.0},
    )


def _draw_points(ax: Axes, points: Points) -> None:
    """Mark each point with a dot and its name."""
    plate = {"facecolor": PAPER, "edgecolor": "none", "boxstyle": "round,pad=0.15"}
    for name, place in points.items():
        ax.plot(*place, "o", color=RED, markeredgecolor=PAPER, markersize=8, zorder=7)
        at: Any = {"xytext": (0, -10), "ha": "center", "va": "top", "textcoords": "offset points"}
        ax.annotate(name, place, bbox=plate, fontsize=8.5, zorder=7, **at)


def describe(
    sizes: Attention | None = None,
    machine: str | Hardware = "h100",
    P: int = 8,
    latency_s: float | None = None,
    memory_bytes: float | None = None,
    hybrids: bool = False,
    points: Points | None = None,
) -> str:
    """Return the map in words: its alternative text."""
    asked = question(sizes, machine, P, latency_s, memory_bytes, hybrids)
    _, _, best = grid(asked)
    shares = ", ".join(
        f"{WORDS[kind]} on {(best == kind).mean():.0%}" for kind in COLOURS if (best == kind).any()
    )
    by_rows = ""
    if (best == HYBRID).any():
        there = rows(asked)
        parts = (f"U = {U} on {(there == U).mean():.0%}" for U in np.unique(there[there > 0])[::-1])
        by_rows = f"The best hybrid has {', '.join(parts)}. "
    ulysses = f"Ulysses cannot be used: it {asked.ulysses_refusal}. " if asked.ulysses_refusal else ""
    own = machine if isinstance(machine, Hardware) else hardware(machine)
    marked = "".join(
        f" Marked: {name}, {c:,} tokens per rank and {units.short(B, 'bytes/s')}."
        for name, (c, B) in (points or {}).items()
    )
    return (
        f"{_title(asked, own)}. Tokens per rank from {TOKENS[0]} to {_tokens(TOKENS[1])}, bandwidth from 100 MB/s to 2 TB/s, "
        f"latency {asked.latency_s * 1e6:.3g} µs. Of the map: {shares}. {by_rows}{ulysses}"
        f"Most tokens per rank in {_memory(asked)}: {', '.join(_room(asked))}. "
        f"To the right of the heavy line a ring hides all of its hops.{marked}"
    )


def player(machine: str = "h100", P: int = 8, *, sizes: Attention | None = None, **options: Any) -> Any:
    """Return a widget with controls for machine, ranks, heads, head dim, dtype and mask, and words below.

    `sizes` gives the heads, K/V heads and head dim at the start; `options` are those of `figure`.
    """
    ipywidgets = import_widgets()

    first = sizes or Attention()
    late = {"continuous_update": False}
    which = ipywidgets.SelectionSlider(options=MACHINES, value=machine, description="machine", **late)
    ranks = ipywidgets.SelectionSlider(
        options=[2, 4, 8, 16, 32, 64], value=P, description="P (ranks)", **late
    )
    heads = ipywidgets.SelectionSlider(options=[8, 16, 32, 64, 128], value=first.H, description="H", **late)
    kv_heads = ipywidgets.SelectionSlider(
        options=[1, 2, 4, 8, 16, 32], value=first.K, description="K", **late
    )
    dim = ipywidgets.SelectionSlider(options=[64, 128, 256], value=first.D, description="D", **late)
    dtype = panel.buttons(_dtypes(machine))
    dtype.value = "bfloat16"
    causal = ipywidgets.Checkbox(value=True, description="causal, balanced")
    picture = ipywidgets.HTML()

    def redraw(_: object = None) -> None:
        if kv_heads.value > heads.value:
            kv_heads.value = heads.value  # redraws
            return
        sizes = Attention(1, heads.value, kv_heads.value, dim.value, dtype.value, causal.value)
        given = sizes, which.value, ranks.value
        picture.value = as_html(figure(*given, **options), describe(*given, **options))

    def other_machine(change: dict[str, Any]) -> None:
        kept, offered = dtype.value, _dtypes(change["new"])
        with dtype.hold_trait_notifications():
            dtype.options = offered
            dtype.value = kept if kept in offered else "bfloat16"
        redraw()

    which.observe(other_machine, names="value")
    for control in (ranks, heads, kv_heads, dim, dtype, causal):
        control.observe(redraw, names="value")
    redraw()
    rows = [[which, ranks], [heads, kv_heads, dim], [dtype, causal]]
    return ipywidgets.VBox([*(ipywidgets.HBox(row) for row in rows), picture])


def play(machine: str = "h100", P: int = 8, *, sizes: Attention | None = None, **options: Any) -> None:
    """Show the player if a person can use it, otherwise the map at the same values.

    `options` are those of `figure`: its latency, memory, hybrids and points.
    """
    given = sizes, machine, P
    show_player(
        lambda: player(machine, P, sizes=sizes, **options),
        lambda: show(figure(*given, **options), describe(*given, **options)),
    )


def _dtypes(machine: str) -> list[str]:
    return [dtype for dtype in ("bfloat16", "float8", "float32") if dtype in hardware(machine).flops_per_s]


def _title(asked: Question, known: Hardware) -> str:
    sizes, rate = asked.sizes, units.short(asked.F, "FLOP/s")
    mask = "causal" if sizes.causal else "no mask"
    heads = f"{sizes.H} query, {sizes.K} K/V heads of {sizes.D}"
    return f"{asked.P} × {short(known)} at {rate}: {heads}, {sizes.dtype}, {mask}"


def _memory(asked: Question) -> str:
    size = asked.memory_bytes / 1e9
    return f"{size:,.0f} GB" if size >= 1000 else f"{size:.3g} GB"


def _room(asked: Question) -> list[str]:
    """Return the most tokens per rank that fit into memory, by schedule."""
    names = {RING: "ring", ULYSSES: "Ulysses", HYBRID: "hybrid", ALLGATHER: "all-gather"}
    return [f"{names[kind]} {_decimal(asked.most_tokens[kind])}" for kind in asked.choices]


def _decimal(count: int) -> str:
    """Return a number of tokens to three digits, with decimal units like the machines' rows."""
    return f"{count / 1e6:.3g} million" if count >= 1e6 else f"{float(f'{count:.3g}'):,.0f}"


def _tokens(count: float) -> str:
    for size, letter, least in ((2**20, "M", 1000 * 2**10), (2**10, "k", 2**10)):
        if count >= least:
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"


def _write(ax: Axes, text: str, x: float, y: float, *, small: bool = False, rotation: float = 0) -> None:
    plate = {"facecolor": PAPER, "edgecolor": "none", "boxstyle": f"round,pad={0.1 if small else 0.25}"}
    look: Any = {"ha": "center", "va": "center", "fontsize": 9.5, "fontweight": "bold", "rotation": rotation}
    ax.text(x, y, text, bbox=plate, zorder=6, **look)
