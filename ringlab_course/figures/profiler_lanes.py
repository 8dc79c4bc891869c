"""Profiler lanes: each rank's computations, its copies, and the copies during which it computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringlab.errors import CommError
from ringlab.viz.frontend import import_widgets, show_player
from ringlab.viz.gantt_chart import in_unit, time_unit
from ringlab.viz.lanes import Interval, Span, duration, exposed, lane, overlap
from ringlab.viz.style import INK, ORANGE, PAPER, QUIET, RED, SKY, new_figure, show, styled
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS: dict[str, dict[str, Any]] = {
    "compute": {"facecolor": SKY, "edgecolor": "none"},
    "copy": {"facecolor": ORANGE, "edgecolor": "none"},
    "exposed": {"facecolor": PAPER, "edgecolor": RED, "hatch": "/////", "linewidth": 0.6},
    "thin": {"facecolor": RED, "edgecolor": "none"},
}
WORDS = {
    "compute": "computes",
    "copy": "copies while it computes: hidden",
    "exposed": "copies and computes nothing: exposed",
}
EDGE: dict[str, Any] = {"edgecolor": PAPER, "linewidth": 1.2}
"""The edge between the bars of a run with numbered computations, so that its steps can be told apart."""
# An exposed interval that is too thin for hatching is filled with the same colour.
ROWS = {"compute": (0.08, 0.40), "copy": (0.52, 0.40)}
"""(top, height) of a rank's two lanes in a row of height 1."""
EVERYBODY = "all ranks"
Runs = Mapping[str, Sequence[Span]]
"""Spans by the name of the run."""


def ranks_of(spans: Sequence[Span]) -> list[int]:
    """Return the ranks that have spans, in ascending order. Raises: CommError if there are none."""
    found = sorted({span.rank for span in spans})
    if not found:
        raise CommError("a profile with spans", "none", "profile the run itself, on every rank")
    return found


def figure(runs: Runs, rank: int | None = None) -> Figure:
    """Return the lanes of all runs on one time axis, one run below the other; `rank` selects a single rank.

    Raises: CommError for a run without spans, or without spans of `rank`.
    """
    shown = {name: _chosen(spans, rank) for name, spans in runs.items()}
    end = max(duration(spans) for spans in runs.values())
    height = 0.75 if rank is None else 1.1
    with styled():
        drawn = new_figure((8.0, sum(height * len(rows) + 0.5 for rows in shown.values()) + 0.8))
        ratios = [height * len(rows) + 0.5 for rows in shown.values()]
        axes = drawn.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
        for ax, (name, spans) in zip(axes, runs.items(), strict=True):
            _draw(ax, spans, shown[name], end, name)
        axes[-1].set_xlabel(f"time since all ranks were ready ({time_unit(end)[1]})")
        _legend(drawn, numbered=any(map(_numbered, runs.values())))
    return drawn


def describe(runs: Runs, rank: int | None = None) -> str:
    """Return the picture in words. Raises: CommError for a run without spans, or without spans of `rank`."""
    sentences = []
    for name, spans in runs.items():
        scale, unit = time_unit(duration(spans))
        parts = []
        for one in _chosen(spans, rank):
            found = overlap(spans, one)
            parts.append(
                f"rank {one} computes {in_unit(found.compute_s, scale)} {unit} and copies {in_unit(found.copy_s, scale)} {unit}, "
                f"{in_unit(found.exposed_s, scale)} {unit} of it exposed"
            )
        sentences.append(f"{name}, over after {in_unit(duration(spans), scale)} {unit}: {'; '.join(parts)}.")
    return " ".join(sentences)


def player(runs: Runs) -> Any:
    """Return a widget whose buttons (Tab and arrow keys) choose one rank or all, with picture and words."""
    ipywidgets = import_widgets()

    from ringlab.viz.style import as_html

    ranks = sorted({rank for spans in runs.values() for rank in ranks_of(spans)})
    names = {EVERYBODY: None, **{f"rank {rank}": rank for rank in ranks}}
    which = panel.buttons([*names])

    def draw() -> str:
        rank = names[which.value]
        return as_html(figure(runs, rank), describe(runs, rank))

    return ipywidgets.VBox([which, panel.moved_by(draw, which)])


def play(runs: Runs) -> None:
    """Show the player if a person can use it, otherwise the lanes of all ranks."""
    show_player(lambda: player(runs), lambda: show(figure(runs), describe(runs)))


def _chosen(spans: Sequence[Span], rank: int | None) -> list[int]:
    there = ranks_of(spans)
    if rank is not None and rank not in there:
        raise CommError(f"one of the ranks {there}", repr(rank))
    return there if rank is None else [rank]


def _draw(ax: Axes, spans: Sequence[Span], ranks: Sequence[int], end: float, name: str) -> None:
    scale, unit = time_unit(end)
    apart = _numbered(spans)
    for place, rank in enumerate(ranks):
        for which in ("compute", "copy"):
            each = [(s.start, s.end) for s in spans if (s.rank, s.lane) == (rank, which)]
            bars, edge = (each, EDGE) if apart else (lane(spans, rank, which), {})
            _bars(ax, bars, which, which, place, scale, **edge)
        if apart:
            _number(ax, [s for s in spans if (s.rank, s.lane) == (rank, "compute")], place, scale, end)
        bare = exposed(spans, rank)
        for look, seen in (
            ("exposed", [each for each in bare if each[1] - each[0] > end / 300]),
            ("thin", [each for each in bare if each[1] - each[0] <= end / 300]),
        ):
            _bars(ax, seen, look, "copy", place, scale)
        found = overlap(spans, rank)
        ax.text(
            1.01,
            place + 0.5,
            f"{found.fraction:.0%} hidden",
            transform=ax.get_yaxis_transform(),
            va="center",
            fontsize=9,
            color=QUIET,
        )
    over = duration(spans)
    ax.axvline(over / scale, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
    ax.set(xlim=(0, 1.004 * end / scale), ylim=(len(ranks), 0))
    ticks = [
        (place + top + tall / 2, which) for place in range(len(ranks)) for which, (top, tall) in ROWS.items()
    ]
    labels = [f"rank {ranks[n // 2]}  {which}" if n % 2 == 0 else which for n, (_, which) in enumerate(ticks)]
    ax.set_yticks([at for at, _ in ticks], labels, fontsize=9)
    ax.set_title(f"{name}: over after {in_unit(over, scale)} {unit}", fontsize=10.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)


def _step(span: Span) -> str:
    """Return the step number at the end of a computation's name, or "" if there is none."""
    last = span.name.split()[-1:]
    return last[0] if last and last[0].isdigit() else ""


def _numbered(spans: Sequence[Span]) -> bool:
    """Return whether the names of all computations end with their step."""
    return all(_step(span) for span in spans if span.lane == "compute")


def _number(ax: Axes, computations: Sequence[Span], place: int, scale: float, end: float) -> None:
    """Write the step number into each bar that has room for it."""
    top, height = ROWS["compute"]
    for span in computations:
        if span.end - span.start > end / 60:
            at = (span.start + span.end) / 2 / scale, place + top + height / 2
            ax.text(*at, _step(span), ha="center", va="center", fontsize=8, color=INK)


def _bars(
    ax: Axes, intervals: Sequence[Interval], look: str, row: str, place: int, scale: float, **edge: Any
) -> None:
    top, height = ROWS[row]
    bars = [(start / scale, (end - start) / scale) for start, end in intervals]
    if bars:
        ax.broken_barh(bars, (place + top, height), gid=f"{look} {place}", **{**LOOKS[look], **edge})


def _legend(drawn: Figure, *, numbered: bool) -> None:
    words = {**WORDS, "compute": f"{WORDS['compute']} (number: step)"} if numbered else WORDS
    patches = [panel.patch(label=word, **LOOKS[which]) for which, word in words.items()]
    drawn.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=8.5)
