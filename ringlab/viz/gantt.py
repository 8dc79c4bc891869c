"""A Gantt chart of any trace: when each rank computes and waits, and when each message is under way.

The trace may come from the virtual cluster (virtual seconds), from real processes (measured seconds) or from
the simulator. Only events of the trace are drawn; see `ringlab.viz.gantt_chart` for the bars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringlab.comm.trace import Compute, Exchange, Trace
from ringlab.errors import CommError, require_package
from ringlab.viz.frontend import import_widgets, is_live, show_player
from ringlab.viz.gantt_chart import COMPUTATIONS, MESSAGES, Bar, Chart, chart, in_unit, time_unit
from ringlab.viz.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    QUIET,
    RED,
    RULE,
    SKY,
    as_html,
    image,
    new_figure,
    show,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALE = "#faecc8"
"""A pale ORANGE, for a message that does not move."""
LOOKS: dict[str, dict[str, Any]] = {  # in the order of drawing
    "wait": {"facecolor": PAPER, "edgecolor": RED, "hatch": "/////"},
    "forward": {"facecolor": SKY, "edgecolor": PAPER},
    "backward": {"facecolor": BLUE, "edgecolor": PAPER},
    "other": {"facecolor": GREEN, "edgecolor": PAPER},
    "message": {"facecolor": ORANGE, "edgecolor": PAPER},
    "still": {"facecolor": PALE, "edgecolor": ORANGE},
    "transit": {"facecolor": ORANGE, "edgecolor": PAPER},
    "control": {"facecolor": RULE, "edgecolor": QUIET, "hatch": "...."},
}
WORDS = {
    "forward": "attention (number: step)",
    "backward": "attention backward (number: step)",
    "other": "other computation",
    "wait": "waits for a message",
    "message": "message: posted … complete",
    "transit": "message in transit",
    "still": "message at rest: not sent yet,\nor arrived and not used yet",
    "control": "ranks agree on the call",
}
END: dict[str, Any] = {"color": INK, "linewidth": 1.2, "linestyle": (0, (4, 2))}
"""The style of the line at the end of a run."""
TEXT = {"backward": PAPER, "other": PAPER, "done": QUIET}
"""The colour of a bar's text if it is not INK."""
MOST_RANKS, MOST_ROWS = 16, 32
"""The largest numbers of rows in a chart and in a comparison. If there are more ranks, some are left out."""
_LAUNCHES = "bars show launches, GPUs compute later"
COMPUTE, LANE = (0.08, 0.6), (0.72, 0.18)
"""(top, height) of the bars of computation, and of the lane of messages, in a row of height 1."""


def figure(
    trace: Trace, title: str | None = None, until: float | None = None, ranks: Sequence[int] | None = None
) -> Figure:
    """Return the Gantt chart of `trace`, with a row for each rank.

    until: the end of the time axis in seconds; by default the end of the run. ranks: the ranks to show; by
    default all or, if there are more than 16, 16 evenly spread ones.
    Raises: CommError for a trace without events, an `until` that is not above 0, or ranks that are not in the
    trace.
    """
    return compare([trace], [title or "Timeline"], until, ranks)


def compare(
    traces: Sequence[Trace],
    names: Sequence[str],
    until: float | None = None,
    ranks: Sequence[int] | None = None,
) -> Figure:
    """Return the charts of several traces, one below the other, with a common time axis.

    Raises: CommError as `figure` does, and if the numbers of names and traces differ.
    """
    charts = _visible(_charts(traces, names))
    if until is not None and not until > 0:
        raise CommError("until > 0 seconds", f"until={until!r}")
    end = until or max(one.makespan for one in charts)
    most = min(MOST_RANKS, max(2, MOST_ROWS // len(charts)))
    shown = [_chosen(one.world_size, ranks, most) for one in charts]
    row = 0.44 if sum(map(len, shown)) <= 8 else 0.3
    heights = [row * len(rows) + 0.55 for rows in shown]
    with styled():
        drawn = new_figure((8.0, sum(heights) + 0.75))
        axes = drawn.subplots(len(charts), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for ax, one, name, rows in zip(axes, charts, names, shown, strict=True):
            draw(ax, one, rows, end, name)
        axes[-1].set_xlabel(f"time ({time_unit(end)[1]})")
        kinds: set[str] = {bar.kind for one in charts for bar in one.bars if bar.end > bar.start}
        numbered = any(
            bar.kind in ("forward", "backward") and bar.short[-1].isdecimal()
            for one in charts
            for bar in one.bars
        )
        _legend(drawn, kinds, numbered, with_end=any(one.makespan < end for one in charts))
    return drawn


def draw(ax: Axes, one: Chart, ranks: Sequence[int], end: float, name: str) -> None:
    """Draw one chart up to `end` seconds. Each row has computation and waiting above, and messages below.

    The share of time in which each rank computes is written only if the whole run is shown, and not for a run
    on GPUs.
    """
    scale, unit = time_unit(end)
    for place, rank in enumerate(ranks):
        _draw_rank(ax, one, rank, place, scale, end)
    if one.makespan <= end:
        ax.axvline(one.makespan / scale, **END)
    ax.set(xlim=(0, 1.004 * end / scale), ylim=(len(ranks), 0))
    ax.set_yticks(
        [place + 0.5 for place in range(len(ranks))], [f"rank {rank}" for rank in ranks], fontsize=9
    )
    whole = in_unit(one.makespan, scale)
    if one.launches:
        told = f"{_LAUNCHES}, ends at {whole} {unit}"
    elif one.makespan <= end:
        _busy_column(ax, one, ranks)
        told = f"ends at {whole} {unit}, ranks compute {one.busy_fraction:.0%} of the time"
    else:
        told = f"the first {in_unit(end, scale)} of {whole} {unit}"
    of = "" if len(ranks) == one.world_size else f"   ({len(ranks)} of {one.world_size} ranks)"
    ax.set_title(f"{name}: {told}{of}", fontsize=10.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)


def describe(trace: Trace, name: str = "Timeline") -> str:
    """Return the chart in words, as its alternative text. Raises: CommError for a trace without events."""
    one = chart(trace)
    scale, unit = time_unit(one.makespan)
    does = "launches for" if one.launches else "computes"
    ranks = "; ".join(
        f"rank {rank} {does} {in_unit(one.busy(rank), scale)} {unit} and waits {in_unit(one.waited(rank), scale)} {unit}"
        for rank in _chosen(one.world_size, None, MOST_RANKS)
    )
    share = _LAUNCHES if one.launches else f"ranks compute {one.busy_fraction:.0%} of the time"
    return (
        f"{name}: {one.world_size} rank{'s' * (one.world_size > 1)}, ends at {in_unit(one.makespan, scale)} {unit}, "
        f"{share}; {ranks}."
    )


def describe_all(traces: Iterable[Trace], names: Iterable[str]) -> str:
    """Return several charts in words, as the alternative text of `compare`."""
    return " ".join(describe(trace, name) for trace, name in zip(traces, names, strict=True))


@contextmanager
def live(title: str, until: float | None = None) -> Iterator[Callable[[Trace], None]]:
    """Yield a function that draws a trace in place of the previous one; pass it to `launch(…, watch=…)`.

    until: the least length of the time axis in seconds while the chart grows. At the end the whole chart is
    shown with its text, even if the run failed. If no person watches, only this final chart is shown.

    Raises: MissingExtraError if IPython is not installed.
    """
    require_package("IPython", "lab", "a chart that grows in a notebook")
    from IPython.display import display

    seen: list[Trace] = []
    handle: Any = display({"text/plain": f"{title}: …"}, raw=True, display_id=True) if is_live() else None

    def watch(trace: Trace) -> None:
        if not _drawable(trace):
            return
        seen[:] = [trace]
        if handle is not None:
            name, end = f"{title}, so far", max(until or 0.0, chart(trace).makespan)
            handle.update(image(figure(trace, name, end or None), describe(trace, name)), raw=True)

    try:
        yield watch
    finally:
        for trace in seen:
            drawn, words = figure(trace, title), describe(trace, title)
            if handle is None:
                show(drawn, words)
            else:
                handle.update(image(drawn, words), raw=True)


def _drawable(trace: Trace) -> bool:
    return any(isinstance(event, (Compute, Exchange)) for event in trace.events)


def player(traces: Mapping[str, Trace]) -> Any:
    """Return a widget in which buttons choose the trace and a slider chooses how much time is shown."""
    ipywidgets = import_widgets()

    longest = max(chart(trace).makespan for trace in traces.values())
    which = ipywidgets.ToggleButtons(options=list(traces))
    which.style.button_width = "auto"
    part = ipywidgets.IntSlider(
        value=100, min=5, max=100, step=5, description="show first", readout_format="d"
    )
    picture = ipywidgets.HTML()

    def redraw(_: object = None) -> None:
        trace = traces[which.value]
        drawn = figure(trace, which.value, until=longest * (part.value / 100))
        picture.value = as_html(drawn, describe(trace, which.value))

    for control in (which, part):
        control.observe(redraw, names="value")
    redraw()
    return ipywidgets.VBox([ipywidgets.HBox([which, part, ipywidgets.Label("%")]), picture])


def play(traces: Mapping[str, Trace]) -> None:
    """Show the player if a person is there to use it; otherwise show all charts with a common time axis."""
    show_player(
        lambda: player(traces),
        lambda: show(compare(list(traces.values()), list(traces)), describe_all(traces.values(), traces)),
    )


def _charts(traces: Sequence[Trace], names: Sequence[str]) -> list[Chart]:
    if not traces or len(traces) != len(names):
        raise CommError("as many names as traces, at least one", f"{len(traces)} traces, {len(names)} names")
    return [chart(trace) for trace in traces]


def _visible(charts: list[Chart]) -> list[Chart]:
    """Return the charts. If no message takes time, leave out the bars of messages that do not move.

    Those bars would only repeat the times of computations and waits.
    """
    if any(bar.kind in ("transit", "message") and bar.end > bar.start for one in charts for bar in one.bars):
        return charts
    return [replace(one, bars=tuple(bar for bar in one.bars if bar.kind != "still")) for one in charts]


def _chosen(world_size: int, ranks: Sequence[int] | None, most: int) -> list[int]:
    """Return the ranks to show: `ranks` if given, else all ranks, but at most `most` evenly spread ones."""
    if ranks is None:
        if world_size <= most:
            return list(range(world_size))
        return [round(place * (world_size - 1) / (most - 1)) for place in range(most)]
    if not ranks or len(ranks) > MOST_ROWS or not all(0 <= rank < world_size for rank in ranks):
        raise CommError(f"at most {MOST_ROWS} ranks from 0 to {world_size - 1}", f"ranks={list(ranks)}")
    return list(ranks)


def _draw_rank(ax: Axes, one: Chart, rank: int, place: int, scale: float, end: float) -> None:
    """Draw the bars of one rank in the row at `place`."""
    own = [bar for bar in one.bars if bar.rank == rank and bar.start < end and bar.end > bar.start]
    lanes = max([bar.lane for bar in own], default=0) + 1
    for kind, look in LOOKS.items():
        bars = [bar for bar in own if bar.kind == kind]
        by_lane: dict[int, list[Bar]] = {}
        for bar in bars:
            by_lane.setdefault(bar.lane, []).append(bar)
        for lane, those in by_lane.items():
            top, height = COMPUTE
            if kind in MESSAGES:
                height = LANE[1] / lanes
                top = LANE[0] + lane * height
            spans = [(bar.start / scale, (bar.end - bar.start) / scale) for bar in those]
            thin = [look["edgecolor"] if wide > end / scale / 250 else look["facecolor"] for _, wide in spans]
            # Bars of waits have no edge, because an edge would hide a thin bar.
            shown = look if kind == "wait" else look | {"edgecolor": thin}
            ax.broken_barh(spans, (place + top, height), linewidth=0.5, gid=f"{kind} {rank}", **shown)
    for bar in own:
        _write(ax, bar, place, scale, end)
    last = max([bar.end for bar in own], default=0.0)
    _write(ax, Bar(rank, last, one.makespan, "done", "done"), place, scale, end)


def _write(ax: Axes, bar: Bar, place: int, scale: float, end: float) -> None:
    """Write a computation's short label into its bar if it fits."""
    stop = min(bar.end, end)
    if bar.kind not in (*COMPUTATIONS, "done") or not _fits(bar.short, (stop - bar.start) / end):
        return
    ax.text(
        (bar.start + stop) / 2 / scale,
        place + COMPUTE[0] + 0.54 * COMPUTE[1],
        bar.short,
        ha="center",
        va="center",
        fontsize=8.5,
        color=TEXT.get(bar.kind, INK),
    )


def _fits(text: str, share: float) -> bool:
    """Return whether `text` fits into this share of the axes, which are about 6.6 inches wide."""
    return 0.62 * 8.5 * (len(text) + 0.6) <= 6.6 * 72 * share


def _busy_column(ax: Axes, one: Chart, ranks: Sequence[int]) -> None:
    """Write the share of the time in which each rank computes, to the right of its row."""
    for place, rank in enumerate(ranks):
        ax.text(
            1.01,
            place + 0.5,
            f"{one.busy(rank) / one.makespan:.0%} busy" if one.makespan else "",
            transform=ax.get_yaxis_transform(),
            va="center",
            fontsize=8.5,
            color=QUIET,
        )


def _legend(drawn: Figure, kinds: set[str], numbered: bool, with_end: bool) -> None:
    from matplotlib.artist import Artist
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    words = WORDS if kinds & {"forward", "backward"} else WORDS | {"other": "computation"}
    if not numbered:
        words = {kind: word.removesuffix(" (number: step)") for kind, word in words.items()}
    marks: list[Artist] = [Patch(label=word, **LOOKS[kind]) for kind, word in words.items() if kind in kinds]
    if with_end:
        marks.append(Line2D([], [], label="end of the run", **END))
    drawn.legend(handles=marks, loc="outside lower center", ncols=min(4, len(marks)), fontsize=8.5)
