"""Profiler lanes: each rank's computations, its copies, and the copies during which it computes nothing.

Another picture shows each message as its two ends recorded it, and the most time that it can have taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.comm.trace import Exchange
from ringlab.errors import CommError
from ringlab.viz.frontend import import_widgets, show_player
from ringlab.viz.gantt_chart import in_unit, time_unit
from ringlab.viz.lanes import Interval, Span, duration, exposed, lane, overlap, without
from ringlab.viz.style import INK, ORANGE, PAPER, QUIET, RED, SKY, new_figure, show, styled
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS: dict[str, dict[str, Any]] = {
    "compute": {"facecolor": SKY, "edgecolor": "none"},
    "copy": {"facecolor": ORANGE, "edgecolor": "none"},
    "exposed": {"facecolor": RED, "edgecolor": PAPER, "hatch": "/////", "linewidth": 0},
    "neither": {"facecolor": INK, "edgecolor": "none"},
}
WORDS = {
    "compute": "computes",
    "copy": "copies while it computes: hidden",
    "exposed": "copies and computes nothing: exposed",
    "neither": "neither computes nor copies",
}
BOTH: dict[str, Any] = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.6}
"""The look of the time in which a message can have travelled."""
BLOCK_LOOK: dict[str, Any] = {"facecolor": SKY, "edgecolor": INK, "linewidth": 0.6}
EDGE: dict[str, Any] = {"edgecolor": PAPER, "linewidth": 1.2}
"""The edge between the bars of a run with numbered computations, so that its steps can be told apart."""
ROWS = {"compute": (0.08, 0.40), "copy": (0.52, 0.40), "both": (0.08, 0.84)}
"""(top, height) of a rank's two lanes, and of both together, in a row of height 1."""
EVERYBODY = "all ranks"
SEEN = 150
"""Time in neither lane is drawn if it lasts at least the whole time of the picture divided by this number."""
BLOCK = 20
"""A computation counts as a block if it lasts at least the whole time of the picture divided by this number."""
Runs = Mapping[str, Sequence[Span]]
"""Spans by the name of the run."""
Blame = Mapping[str, Sequence[int]]
"""The rank at fault, or the two ranks of a link at fault, by the name of the run.

If it is given, the exposed time is shown as a share of the run's time.
"""
Ends = Sequence[tuple[Exchange, Exchange]]
"""The messages of a link, each as its sender and as its receiver recorded it."""


def ranks_of(spans: Sequence[Span]) -> list[int]:
    """Return the ranks that have spans, in ascending order. Raises: CommError if there are none."""
    found = sorted({span.rank for span in spans})
    if not found:
        raise CommError("a profile with spans", "none", "profile the run itself, on every rank")
    return found


def figure(runs: Runs, rank: int | None = None, blame: Blame | None = None) -> Figure:
    """Return a picture of the lanes of all runs, one below the other. `rank` selects a single rank.

    The rank or link at fault in `blame` is marked. Raises: CommError for a run without spans, or without spans of `rank`.
    """
    shown = {name: _chosen(spans, rank) for name, spans in runs.items()}
    end = max(duration(spans) for spans in runs.values())
    height = 0.75 if rank is None else 1.1
    with styled():
        drawn = new_figure((8.0, sum(height * len(rows) + 0.5 for rows in shown.values()) + 0.8))
        ratios = [height * len(rows) + 0.5 for rows in shown.values()]
        axes = drawn.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
        for ax, (name, spans) in zip(axes, runs.items(), strict=True):
            _draw(ax, spans, shown[name], end, name, of_run=blame is not None)
            _mark(ax, shown[name], (blame or {}).get(name, ()))
        axes[-1].set_xlabel(f"time since all ranks were ready ({time_unit(end)[1]})")
        _legend(drawn, "step" if any(map(_numbered, runs.values())) else "block", end)
    return drawn


def describe(runs: Runs, rank: int | None = None) -> str:
    """Return the picture in words. Raises: CommError for a run without spans, or without spans of `rank`."""
    sentences = []
    for name, spans in runs.items():
        scale, unit = time_unit(duration(spans))
        parts = []
        for one in _chosen(spans, rank):
            found = overlap(spans, one)
            idle_s = sum(until - begin for begin, until in neither(spans, one))
            parts.append(
                f"rank {one} computes {in_unit(found.compute_s, scale)} {unit} and copies {in_unit(found.copy_s, scale)} {unit}, "
                f"{in_unit(found.exposed_s, scale)} {unit} of it exposed, and does neither for {in_unit(idle_s, scale)} {unit}"
            )
        sentences.append(f"{name}, over after {in_unit(duration(spans), scale)} {unit}: {'; '.join(parts)}.")
    return " ".join(sentences)


def player(runs: Runs, blame: Blame | None = None) -> Any:
    """Return a widget whose buttons (Tab and arrow keys) choose one rank or all, with picture and words."""
    ipywidgets = import_widgets()

    from ringlab.viz.style import as_html

    ranks = sorted({rank for spans in runs.values() for rank in ranks_of(spans)})
    names = {EVERYBODY: None, **{f"rank {rank}": rank for rank in ranks}}
    which = panel.buttons([*names])

    def draw() -> str:
        rank = names[which.value]
        return as_html(figure(runs, rank, blame), describe(runs, rank))

    return ipywidgets.VBox([which, panel.moved_by(draw, which)])


def play(runs: Runs, blame: Blame | None = None) -> None:
    """Show the player if a person can use it, otherwise the lanes of all ranks."""
    show_player(lambda: player(runs, blame), lambda: show(figure(runs, blame=blame), describe(runs)))


def _chosen(spans: Sequence[Span], rank: int | None) -> list[int]:
    there = ranks_of(spans)
    if rank is not None and rank not in there:
        raise CommError(f"one of the ranks {there}", repr(rank))
    return there if rank is None else [rank]


def _draw(
    ax: Axes, spans: Sequence[Span], ranks: Sequence[int], end: float, name: str, *, of_run: bool
) -> None:
    scale, unit = time_unit(end)
    apart = _numbered(spans)
    for place, rank in enumerate(ranks):
        for which in ("compute", "copy"):
            each = [(s.start, s.end) for s in spans if (s.rank, s.lane) == (rank, which)]
            bars, edge = (each, EDGE) if apart else (lane(spans, rank, which), {})
            _bars(ax, bars, which, which, place, scale, **edge)
        _number(ax, [s for s in spans if (s.rank, s.lane) == (rank, "compute")], place, scale, end)
        found = overlap(spans, rank)
        _bars(ax, exposed(spans, rank), "exposed", "copy", place, scale)
        idle = neither(spans, rank)
        seen = [(begin, until) for begin, until in idle if until - begin >= end / SEEN]
        _bars(ax, seen, "neither", "both", place, scale)
        idle_s = sum(until - begin for begin, until in idle)
        share = f"exposed for\n{found.exposed_s / duration(spans):.0%} of the run"
        ax.text(
            1.01,
            place + 0.5,
            share if of_run else f"{found.fraction:.0%} hidden\n{idle_s / scale:.2g} {unit} neither",
            transform=ax.get_yaxis_transform(),
            va="center",
            fontsize=9,
            color=QUIET,
        )
    over = duration(spans)
    ax.axvline(over / scale, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
    ax.set(xlim=(0, 1.004 * end / scale), ylim=(len(ranks), 0))
    ticks = [
        (place + top + tall / 2, which)
        for place in range(len(ranks))
        for which, (top, tall) in ROWS.items()
        if which != "both"
    ]
    labels = [f"rank {ranks[n // 2]}  {which}" if n % 2 == 0 else which for n, (_, which) in enumerate(ticks)]
    ax.set_yticks([at for at, _ in ticks], labels, fontsize=9)
    ax.set_title(f"{name}: over after {in_unit(over, scale)} {unit}", fontsize=10.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)


def neither(spans: Sequence[Span], rank: int) -> list[Interval]:
    """Return the intervals in which a rank neither computes nor copies, in order, up to the end of its last span."""
    own = [(span.start, span.end) for span in spans if span.rank == rank]
    return without([(0.0, max(end for _, end in own))], own)


def _mark(ax: Axes, ranks: Sequence[int], guilty: Sequence[int]) -> None:
    """Shade the row of a rank at fault, or draw a line between the rows of a link at fault."""
    said: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": 9, "fontweight": "bold", "color": RED}
    at: dict[str, Any] = {"transform": ax.get_yaxis_transform()}
    places = [ranks.index(rank) for rank in guilty if rank in ranks]
    if len(guilty) == 1 and places:
        ax.axhspan(places[0] + 0.02, places[0] + 0.98, color=RED, alpha=0.13, zorder=0)
        ax.text(0.99, places[0] + 0.72, "the slow rank", **at, **said)
    elif len(places) == 2:
        ax.axhline(max(places), color=RED, linewidth=3, zorder=0)
        ax.text(0.99, max(places) - 0.16, "the slow link ↓", **at, **said)


def bounds(links: Mapping[str, Ends], block_s: float) -> Figure:
    """Return a panel for each link, with a bar for each end of every message, and a frame around the time at most.

    A bar lasts from an end's post to its done. The frame lasts from the later post to the earlier done. The
    shortest times of a link are bold. block_s: the seconds of a block, drawn below each frame for comparison.
    """
    end = max(each.done for ends in links.values() for pair in ends for each in pair)
    scale, unit = time_unit(end)
    with styled():
        drawn = new_figure((8.0, 0.72 * sum(map(len, links.values())) + 1.7))
        ratios = [len(ends) for ends in links.values()]
        axes = drawn.subplots(len(links), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
        for ax, (name, ends) in zip(axes, links.items(), strict=True):
            _draw_bounds(ax, ends, block_s, scale, unit)
            ax.set_title(name, fontsize=10.5, fontweight="normal")
            ax.set_xlim(0, 1.28 * end / scale)
        drawn.suptitle(
            "A message takes at most as long as its frame: from the later post to the earlier done",
            fontsize=11,
            fontweight="bold",
        )
        axes[-1].set_xlabel(f"time since all ranks were ready ({unit})")
        looks = {
            "from a rank's post to its done": LOOKS["copy"],
            "both have posted, neither is done": BOTH,
            f"a block: {in_unit(block_s, scale)} {unit}": BLOCK_LOOK,
        }
        drawn.legend(
            handles=[panel.patch(label=label, **look) for label, look in looks.items()],
            loc="outside lower center",
            ncols=3,
            fontsize=8.5,
        )
    return drawn


def bound_s(pair: tuple[Exchange, Exchange]) -> float:
    """Return the seconds from the later post to the earlier done. The message took no longer than that."""
    return min(each.done for each in pair) - max(each.posted for each in pair)


def _draw_bounds(ax: Axes, ends: Ends, block_s: float, scale: float, unit: str) -> None:
    times = list(map(bound_s, ends))
    ticks, names = [], []
    for number, pair in enumerate(ends):
        begin, stop = max(each.posted for each in pair), min(each.done for each in pair)
        box: dict[str, Any] = {**BOTH, "zorder": 2}
        ax.broken_barh([(begin / scale, (stop - begin) / scale)], (number + 0.03, 0.82), **box)
        ax.broken_barh([(begin / scale, block_s / scale)], (number + 0.88, 0.08), **BLOCK_LOOK)
        for place, each in enumerate(pair):
            bar = [(each.posted / scale, (each.done - each.posted) / scale)]
            top = number + 0.10 + 0.36 * place
            ax.broken_barh(bar, (top, 0.30), zorder=1, **LOOKS["copy"])
            ticks.append(top + 0.15)
            names.append(f"hop {number + 1}   rank {each.rank}" if place == 0 else f"rank {each.rank}")
        shortest = bool(np.isclose(times[number], min(times)))
        best = ", the shortest" if shortest and not np.allclose(times, min(times)) else ""
        words = f"{in_unit(stop - begin, scale)} {unit}{best}"
        right = max(each.done for each in pair) / scale
        weight = "bold" if shortest else "normal"
        ax.annotate(
            words,
            (right, number + 0.5),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            weight=weight,
        )
    ax.set_yticks(ticks, names, fontsize=9)
    ax.set_ylim(len(ends), 0)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)


def describe_bounds(links: Mapping[str, Ends]) -> str:
    """Return the picture of `bounds` in words."""
    told = []
    for name, ends in links.items():
        times = ", ".join(f"{1e3 * bound_s(pair):.1f}" for pair in ends)
        told.append(f"{name}: at most {times} ms")
    return f"Messages as their two ends saw them, from the later post to the earlier done. {'; '.join(told)}."


def _step(span: Span) -> str:
    """Return the step number at the end of a computation's name, or "" if there is none."""
    last = span.name.split()[-1:]
    return last[0] if last and last[0].isdigit() else ""


def _numbered(spans: Sequence[Span]) -> bool:
    """Return whether the names of all computations end with their step."""
    return all(_step(span) for span in spans if span.lane == "compute")


def _number(ax: Axes, computations: Sequence[Span], place: int, scale: float, end: float) -> None:
    """Label each bar that has room with its step, or number the blocks from 1 if the names have no steps."""
    if _numbered(computations):
        told = [(span, _step(span)) for span in computations if span.end - span.start > end / 60]
    else:
        blocks = sorted((s for s in computations if s.end - s.start >= end / BLOCK), key=lambda s: s.start)
        told = [(span, str(number)) for number, span in enumerate(blocks, 1)]
    top, height = ROWS["compute"]
    for span, text in told:
        at = (span.start + span.end) / 2 / scale, place + top + height / 2
        ax.text(*at, text, ha="center", va="center", fontsize=8, color=INK)


def _bars(
    ax: Axes, intervals: Sequence[Interval], look: str, row: str, place: int, scale: float, **edge: Any
) -> None:
    top, height = ROWS[row]
    bars = [(start / scale, (end - start) / scale) for start, end in intervals]
    if bars:
        ax.broken_barh(bars, (place + top, height), gid=f"{look} {place}", **{**LOOKS[look], **edge})


def _legend(drawn: Figure, number: str, end: float) -> None:
    """Explain the looks that were drawn. `number` says what the numbers of computations count."""
    there = {str(bars.get_gid()).split()[0] for ax in drawn.axes for bars in ax.collections if bars.get_gid()}
    scale, unit = time_unit(end)
    words = {
        **WORDS,
        "compute": f"{WORDS['compute']} (number: {number})",
        "neither": f"{WORDS['neither']}, for {end / SEEN / scale:.1g} {unit} or more",
    }
    patches = [panel.patch(label=word, **LOOKS[which]) for which, word in words.items() if which in there]
    columns = 3 if len(patches) != 4 else 2
    drawn.legend(handles=patches, loc="outside lower center", ncols=columns, fontsize=8.5)
