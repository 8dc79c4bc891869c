"""Pictures of a ring run: the ring step by step, as still pictures or a player, and the coverage matrix.

Colours show the owner of a block, and labels repeat it in text. Everything is read from a `Trace`: the
messages and their order give the place of each block, and the records give computations and bytes. The
pictures use no formula for a right ring, so a wrong ring makes a wrong picture.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.comm.trace import Compute, Exchange, Trace
from ringlab.errors import CommError
from ringlab.viz.frontend import play_steps
from ringlab.viz.style import BLUE, GREEN, INK, PAPER, QUIET, RED, new_figure, png, rank_colour, styled
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ATTEND = "attend"
"""Computations whose label begins with this word are attention on the rank's current block."""


@dataclass(frozen=True)
class Hop:
    """One block in transit from rank `source` to rank `to`; `origin` is its owner, or None if unknown."""

    source: int
    to: int
    origin: int | None
    nbytes: int


@dataclass(frozen=True)
class Frame:
    """One step of the ring: the owner of every rank's block, the ranks that computed, and the blocks sent."""

    step: int
    held: tuple[int | None, ...]
    computed: tuple[int, ...]
    hops: tuple[Hop, ...]

    @property
    def world_size(self) -> int:
        return len(self.held)

    def caption(self) -> str:
        """Return the frame in one sentence."""
        everybody = len(self.computed) == self.world_size
        who = "every rank" if everybody else f"{len(self.computed)} of {self.world_size} ranks"
        verb = "attends to its block" if everybody else "attend to their blocks"
        onward = ", which then travels to the next rank" if self.hops and everybody else ""
        return f"Step {self.step}: {who} {verb}{onward}."

    def describe(self) -> str:
        """Return the frame in words, one sentence per rank."""
        hops = {hop.source: hop for hop in self.hops}
        lines = [f"Step {self.step}."]
        for rank, origin in enumerate(self.held):
            verb = "attends to" if rank in self.computed else "holds"
            onward = (
                f" and sends it to rank {hops[rank].to} ({hops[rank].nbytes:,} bytes)" if rank in hops else ""
            )
            lines.append(f"Rank {rank} {verb} the K/V of {_owner(origin)}{onward}.")
        return " ".join(lines)


def frames(trace: Trace) -> list[Frame]:
    """Return the steps of a ring run, in order: one more than the exchanges of the busiest rank.

    Raises: CommError if a rank sends to more than one other rank, because then this is not a ring.
    """
    ranks = range(trace.world_size)
    for rank in ranks:
        if len(trace.peers(rank)) > 1:
            raise CommError(
                "a ring: every rank sends to one neighbour",
                f"rank {rank} sends to ranks {sorted(trace.peers(rank))}",
                "play the trace of a ring program, not that of a collective",
            )
    exchanges = [sorted(trace.exchanges(rank), key=lambda e: e.index) for rank in ranks]
    steps = max(len(own) for own in exchanges) + 1
    return [_frame(trace, exchanges, step) for step in range(steps)]


def _frame(trace: Trace, exchanges: list[list[Exchange]], step: int) -> Frame:
    ranks = range(trace.world_size)
    held = tuple(_holder(exchanges, rank, step) for rank in ranks)
    computed = tuple(rank for rank in ranks if step in _computing_steps(trace, rank))
    hops = tuple(
        Hop(rank, to, held[rank], own[step].bytes_sent)
        for rank, own in enumerate(exchanges)
        if step < len(own) and (to := own[step].to) is not None
    )
    return Frame(step, held, computed, hops)


def _holder(exchanges: list[list[Exchange]], rank: int, received: int) -> int | None:
    """Return the owner of the block that `rank` holds after `received` messages.

    Each message is followed back to the rank that sent it.
    """
    while received:
        if received > len(exchanges[rank]):
            return None
        source = exchanges[rank][received - 1].source
        if source is None:
            return None
        arrivals = [e.source for e in exchanges[rank][:received]].count(source)
        sends = [place for place, e in enumerate(exchanges[source]) if e.to == rank]
        if arrivals > len(sends) or sends[arrivals - 1] >= received:
            return None
        rank, received = source, sends[arrivals - 1]
    return rank


def _computing_steps(trace: Trace, rank: int) -> set[int]:
    """Return the steps in which `rank` attended; a step is the number of its earlier exchanges."""
    steps, received = set(), 0
    for event in trace.events:
        if event.rank != rank:
            continue
        if isinstance(event, Compute):
            if event.label.startswith(ATTEND):
                steps.add(received)
        elif isinstance(event, Exchange) and not event.control:
            received += 1
    return steps


def coverage(trace: Trace) -> np.ndarray:
    """Return how often the queries of rank r met the block of rank o: int64 (P, P) [r, o]."""
    times = np.zeros((trace.world_size, trace.world_size), dtype=np.int64)
    for frame in frames(trace):
        for rank in frame.computed:
            if frame.held[rank] is not None:
                times[rank, frame.held[rank]] += 1
    return times


def when(trace: Trace) -> np.ndarray:
    """Return the step in which each pair of `coverage` was last computed: float64 (P, P), NaN for never."""
    steps = np.full((trace.world_size, trace.world_size), math.nan)
    for frame in frames(trace):
        for rank in frame.computed:
            if frame.held[rank] is not None:
                steps[rank, frame.held[rank]] = frame.step
    return steps


def _owner(origin: int | None) -> str:
    return "an unknown rank" if origin is None else f"rank {origin}"


DARK = {BLUE, RED, GREEN}
"""Fills on which white text is easier to read."""


def owner_colour(origin: int | None) -> str:
    """Return the colour of the K/V block of rank `origin`, or white if its owner is unknown."""
    return PAPER if origin is None else rank_colour(origin)


def draw_ring(ax: Axes, frame: Frame, *, blocks: bool = True) -> None:
    """Draw one step: ranks on a circle, the block of each rank, and arrows for blocks in transit.

    A solid outline means that the rank computes with its block in this step. blocks: whether the blocks are
    drawn.
    """
    places = [_place(rank, frame.world_size) for rank in range(frame.world_size)]
    for hop in frame.hops:
        _draw_hop(ax, places[hop.source], places[hop.to], owner_colour(hop.origin), frame.world_size)
    for rank, (x, y) in enumerate(places):
        ax.text(1.7 * x, 1.38 * y, f"rank {rank}", ha="center", va="center", fontsize=8.5, color=INK)
        if blocks:
            _draw_block(ax, (x, y), rank, frame)
    moved = sorted({hop.nbytes for hop in frame.hops})
    sent = " or ".join(f"{n:,}" for n in moved) + " bytes\nper hop" if moved else "nothing\nsent"
    ax.text(0, 0, f"step {frame.step}\n{sent}", ha="center", va="center", fontsize=8.5, color=INK)
    reach = _radius(frame.world_size)
    ax.set(xlim=(-1.97 * reach, 1.97 * reach), ylim=(-1.5 * reach, 1.5 * reach), aspect="equal")
    ax.axis("off")


def draw_coverage(ax: Axes, trace: Trace, upto: int | None = None) -> None:
    """Draw the step in which each rank met each rank's K/V; steps after `upto` are left out.

    A cell's number is its step. ×n marks a pair that was computed n times. The cell of a pair is empty if it
    was never computed, or was last computed in a step after `upto`.
    """
    steps, times = when(trace), coverage(trace)
    P = trace.world_size
    ax.imshow(np.zeros((P, P)), cmap="Greys", vmin=0, vmax=1)
    for rank in range(P):
        for origin in range(P):
            step = steps[rank, origin]
            if math.isnan(step) or (upto is not None and step > upto):
                continue
            _draw_cell(ax, rank, origin, _cell_text(step, times[rank, origin]), current=step == upto)
    ax.set_xticks(range(P), [f"K/V {r}" if P <= 5 else f"{r}" for r in range(P)], fontsize=8)
    ax.set_xlabel("" if P <= 5 else "owner of the K/V", fontsize=8)
    ax.set_yticks(range(P), [f"Q {r}" for r in range(P)], fontsize=8)
    ax.set_xticks(np.arange(-0.5, P), minor=True)
    ax.set_yticks(np.arange(-0.5, P), minor=True)
    ax.grid(False, which="major")
    ax.grid(which="minor", color=QUIET, linewidth=0.8)
    ax.tick_params(which="both", length=0)
    ax.set_title("queries Q met K/V in step …", fontsize=9, color=INK)


def strip(trace: Trace) -> Figure:
    """Return a picture of all steps as small multiples, and the coverage matrix after the last one."""
    steps = frames(trace)
    columns = math.ceil(math.sqrt(len(steps)))
    rows = -(-len(steps) // columns)
    with styled():
        figure = new_figure((2.6 * columns + 3.2, max(2.3 * rows, 3.2) + 0.3))
        figure.suptitle("Which K/V block each rank attends to, and where it travels next", fontsize=10.5)
        grid = figure.add_gridspec(rows, columns + 1, width_ratios=(*[2.6] * columns, 3.2))
        for place, frame in enumerate(steps):
            draw_ring(figure.add_subplot(grid[divmod(place, columns)]), frame)
        draw_coverage(figure.add_subplot(grid[:, columns]), trace)
    return figure


def still(trace: Trace, step: int, *, blocks: bool = True) -> Figure:
    """Return a picture of one step, with the coverage matrix up to this step."""
    with styled():
        figure = new_figure((7.2, 3.6))
        left, right = figure.subplots(1, 2)
        draw_ring(left, frames(trace)[step], blocks=blocks)
        draw_coverage(right, trace, upto=step)
    return figure


def describe(trace: Trace) -> str:
    """Return the whole run in words: the alternative text of `strip`."""
    return " ".join(frame.describe() for frame in frames(trace))


def pictures(trace: Trace) -> list[str]:
    """Return the steps of the run, each as `moving` draws it."""
    steps = frames(trace)
    return [moving(trace, frame, before) for frame, before in zip(steps, [None, *steps], strict=False)]


def moving(trace: Trace, frame: Frame, before: Frame | None = None) -> str:
    """Return one step as HTML in which each block moves from its sender to its new rank.

    before: the previous step, whose hops give the senders. A reader who prefers less motion sees the blocks
    at once in their new places.
    """
    figure = still(trace, frame.step, blocks=False)
    # draw the picture first, because positions of its parts are known only after drawing
    data = base64.b64encode(png(figure)).decode("ascii")
    (wide, high), to_pixels = figure.get_size_inches() * figure.dpi, figure.axes[0].transData.transform
    places = [to_pixels(_place(rank, frame.world_size)) for rank in range(frame.world_size)]
    came = {hop.to: hop.source for hop in before.hops} if before else {}
    boxes = [
        _box(frame, rank, (x, high - y), _away(places, rank, came.get(rank, rank)))
        for rank, (x, y) in enumerate(places)
    ]
    words = html.escape(frame.describe())
    return (
        f"<style>{TRAVEL}</style>"
        f'<div style="position: relative; max-width: {wide:.0f}px">'
        f'<img alt="{words}" src="data:image/png;base64,{data}" style="width: 100%">'
        f'<svg aria-hidden="true" viewBox="0 0 {wide:.0f} {high:.0f}" style="position: absolute; inset: 0">'
        f"{''.join(boxes)}</svg></div>"
        f'<p aria-live="polite" style="height: 1.5em">{html.escape(frame.caption())}</p>'
    )


TRAVEL = (
    "@keyframes ring-view-travel { from { transform: translate(var(--dx), var(--dy)) } } "
    "@media (prefers-reduced-motion: no-preference) { .ring-view-block { animation: ring-view-travel 0.9s ease-in-out } }"
)
"""The animation in which each block starts at the place that it came from."""


def _away(places: Sequence[Any], rank: int, source: int) -> tuple[float, float]:
    """Return the offset in pixels from a rank to the rank that sent its block (x to the right, y down)."""
    return places[source][0] - places[rank][0], places[rank][1] - places[source][1]


def _box(frame: Frame, rank: int, place: tuple[float, float], away: tuple[float, float]) -> str:
    """Return the block on a rank as a piece of SVG."""
    (x, y), origin = place, frame.held[rank]
    fill = owner_colour(origin)
    dashes = "" if rank in frame.computed else ' stroke-dasharray="2 3"'
    return (
        f'<g class="ring-view-block" style="--dx: {away[0]:.1f}px; --dy: {away[1]:.1f}px">'
        f'<rect x="{x - 26:.1f}" y="{y - 13:.1f}" width="52" height="26" rx="7" fill="{fill}" stroke="{INK}"{dashes}/>'
        f'<text x="{x:.1f}" y="{y + 5:.1f}" text-anchor="middle" font-family="DejaVu Sans, sans-serif" font-size="13" '
        f'fill="{"white" if fill in DARK else INK}">K/V {"?" if origin is None else origin}</text></g>'
    )


def play(trace: Trace) -> None:
    """Show the steps in a player with a Play button and a slider."""
    still = f"steps 0 to {len(frames(trace)) - 1}: run this cell to play them; they stand side by side below"
    play_steps(lambda: pictures(trace), "step", {"text/plain": still})


def _radius(world_size: int) -> float:
    """Return the radius of the circle, which is larger for many ranks."""
    return 1.1 if world_size <= 5 else 1.6


def _place(rank: int, world_size: int) -> tuple[float, float]:
    """Return the place of a rank on the circle, clockwise from the top; two ranks are side by side."""
    start = math.pi if world_size == 2 else math.pi / 2
    angle = start - 2 * math.pi * rank / world_size
    return _radius(world_size) * math.cos(angle), _radius(world_size) * math.sin(angle)


def _draw_block(ax: Axes, place: tuple[float, float], rank: int, frame: Frame) -> None:
    x, y = place
    origin = frame.held[rank]
    fill = owner_colour(origin)
    busy = rank in frame.computed
    box = {
        "boxstyle": "round,pad=0.4",
        "facecolor": fill,
        "edgecolor": INK,
        "linewidth": 1.6 if busy else 1,
        "linestyle": "-" if busy else ":",
    }
    ax.text(
        x,
        y,
        f"K/V {'?' if origin is None else origin}",
        ha="center",
        va="center",
        fontsize=8.5,
        color="white" if fill in DARK else INK,
        bbox=box,
        zorder=3,
    )


def _draw_hop(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, world_size: int
) -> None:
    if start == end:
        return
    bend = -0.5 if world_size == 2 else -1 / world_size
    arrow = {
        "arrowstyle": "-|>,head_width=0.3,head_length=0.5",
        "color": colour,
        "linewidth": 2.2,
        "connectionstyle": f"arc3,rad={bend}",
        "shrinkA": 12,
        "shrinkB": 13,
    }
    ax.annotate("", xy=end, xytext=start, arrowprops=arrow, zorder=2)


def _cell_text(step: float, times: int) -> str:
    return f"{step:.0f}" if times == 1 else f"{step:.0f} ×{times}"


def _draw_cell(ax: Axes, rank: int, origin: int, text: str, *, current: bool) -> None:
    fill = owner_colour(origin)
    panel.add_rectangle(ax, (origin - 0.5, rank - 0.5), 1, 1, facecolor=fill, alpha=0.9, zorder=1)
    if current:
        panel.add_rectangle(
            ax, (origin - 0.42, rank - 0.42), 0.84, 0.84, fill=False, edgecolor=INK, linewidth=2, zorder=2
        )
    ax.text(
        origin,
        rank,
        text,
        ha="center",
        va="center",
        fontsize=10,
        zorder=3,
        color="white" if fill in DARK else INK,
    )
