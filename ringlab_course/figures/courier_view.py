"""A picture of the couriers of a backward ring: a row per rank, a column per step, and the terms in each sum.

Everything is read from the messages of a real run with special inputs, called probes. In the picture, colour
and place show which rank added a term, and the number shows whose block the term belongs to.
With v = 0 and out = 0, the gradient of v is Pᵀ·dO. With lse = 0, a weight is e^score, and k is chosen so that
this weight is 16^o for the keys of rank o. The dO of rank r is 1 in column r of its last row and 0 elsewhere.
So the base-16 digits of column r of a dV count how often rank r added a term of each rank's block. The
picture uses no formula for a right ring, so a wrong ring makes a wrong picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.comm.trace import Trace
from ringlab.viz.frontend import play_steps
from ringlab.viz.gantt import LOOKS, TEXT, WORDS
from ringlab.viz.gantt_chart import Bar, Chart, chart, in_unit
from ringlab.viz.style import (
    BLUE,
    GREEN,
    INK,
    PAPER,
    QUIET,
    RED,
    RULE,
    as_html,
    new_figure,
    rank_colour,
    styled,
)
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ringlab.comm.protocol import Comm, Work, Wrapper
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.errors import CommError
from ringlab.layout import Layout

BASE = 16
BLOCKS, COURIERS = "kv", "dkv"
"""The prefixes of the tags of messages that carry K/V, and dK/dV."""
Program = Callable[..., Any]


@dataclass(frozen=True)
class Frame:
    """One step: for every rank the owner of its K/V, the sum that it sends, and the rank that receives it.

    sums: by rank, an int64 array [contributor, owner] of how often the contributor added a term of the
    owner's block. The last frame contains the sums that the ranks returned, and nothing is sent.
    """

    step: int
    held: tuple[int | None, ...]
    sums: tuple[np.ndarray | None, ...]
    to: tuple[int | None, ...]

    @property
    def home(self) -> bool:
        """Whether this frame shows the sums that the ranks returned."""
        return all(rank is None for rank in self.held)

    def describe(self) -> str:
        """Return the frame in words, one sentence per rank."""
        lines = [f"{'At the end' if self.home else f'Step {self.step}'}: what stands in each rank's box."]
        for rank, sums in enumerate(self.sums):
            what = "no gradient" if sums is None else _inside(sums)
            if self.home:
                lines.append(f"Rank {rank} returns {what}.")
                continue
            onward = "" if self.to[rank] is None or sums is None else f" to rank {self.to[rank]}"
            lines.append(f"Rank {rank}, with K/V {self.held[rank]}, sends {what}{onward}.")
        return " ".join(lines)


def follow(program: Program, layout: Layout) -> list[Frame]:
    """Return the frames of `program(ring, dout, q, k, v, out, lse)`, which returns (dq, dk, dv) of a rank.

    The program must compute scores as q·k/√D, where D is that of its q; another scale shows as wrong counts.
    The tags of its messages must begin with "kv" and "dkv", and the messages carry k, v and dk, dv.
    Raises: CommError for more than 6 ranks, because float32 has too few digits for them, and for a rank
    without tokens.
    """
    P = layout.P
    if P > 6 or not all(layout.lengths):
        raise CommError("a ring of at most 6 ranks, each with a token", f"{P} ranks, {layout.lengths} tokens")
    probes = [_probe(layout, rank) for rank in range(P)]
    logs: list[list[_Sent]] = [[] for _ in range(P)]

    def watched(ring: Any) -> Any:
        return program(Ring(_Watching(ring.comm, logs[ring.rank])), *probes[ring.rank])

    results = VirtualCluster(P).run(watched).results
    steps = max(sum(s.tag.startswith(COURIERS) for s in log) for log in logs)
    frames = [_frame(logs, step) for step in range(max(steps, P))]
    nobody = (None,) * P
    return [*frames, Frame(len(frames), nobody, tuple(_counts(dv) for _, _, dv in results), nobody)]


def _probe(layout: Layout, rank: int) -> tuple[Tensor, ...]:
    """Return dout, q, k, v, out and lse of a rank, with head dim P."""
    L, P = layout.length(rank), layout.P
    zeros = torch.zeros(1, 1, L, P)
    q, k, dout = zeros.clone(), zeros.clone(), zeros.clone()
    q[..., 0], k[..., 0] = math.sqrt(P), rank * math.log(BASE)
    dout[..., int(np.argmax(layout.positions(rank))), rank] = 1.0
    return dout, q, k, zeros, zeros.clone(), torch.zeros(1, 1, L)


@dataclass(frozen=True)
class _Sent:
    tag: str
    to: int | None
    tensors: tuple[Tensor, ...]


class _Watching(Wrapper):
    """A wrapper of `comm` that keeps a copy of everything that is sent."""

    def __init__(self, comm: Comm, log: list[_Sent]) -> None:
        super().__init__(comm)
        self.log = log

    def exchange(
        self,
        *,
        send: Sequence[Tensor] = (),
        to: int | None = None,
        receive: Sequence[Tensor] = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        self.log.append(_Sent(tag, to, tuple(t.detach().float() for t in send)))
        self.log[-1] = _Sent(tag, to, tuple(t.clone() for t in self.log[-1].tensors))
        return self.inner.exchange(send=send, to=to, receive=receive, source=source, tag=tag)


def _frame(logs: list[list[_Sent]], step: int) -> Frame:
    P = len(logs)
    couriers = [_nth(log, COURIERS, step) for log in logs]
    return Frame(
        step,
        tuple(_held(logs, rank, step) for rank in range(P)),
        tuple(None if sent is None else _counts(sent.tensors[-1]) for sent in couriers),
        tuple(None if sent is None else sent.to for sent in couriers),
    )


def _held(logs: list[list[_Sent]], rank: int, step: int) -> int | None:
    """Return the owner of the K/V on `rank`, as read from what it sends or has received last."""
    sent = _nth(logs[rank], BLOCKS, step)
    if sent is None and step:
        arrived = [found for log in logs if (found := _nth(log, BLOCKS, step - 1)) and found.to == rank]
        sent = arrived[0] if arrived else None
    if sent is None:
        return rank if step == 0 else None
    return round(sent.tensors[0].max().item() / math.log(BASE))


def _nth(log: list[_Sent], begins: str, number: int) -> _Sent | None:
    of_kind = [sent for sent in log if sent.tag.startswith(begins)]
    return of_kind[number] if number < len(of_kind) else None


def _counts(dv: Tensor) -> np.ndarray:
    """Return the digits of each column as counts [contributor, owner]."""
    P = dv.shape[-1]
    values = np.rint(dv[0, 0].amax(dim=0).double().numpy()).astype(np.int64)
    return np.array([[value // BASE**owner % BASE for owner in range(P)] for value in values])


def _inside(sums: np.ndarray) -> str:
    """Return the contents of a courier in words."""
    by_owner = {
        owner: [str(rank) for rank in range(len(sums)) if sums[rank, owner]] for owner in range(len(sums))
    }
    parts = [f"dK/dV {owner} from {', '.join(ranks)}" for owner, ranks in by_owner.items() if ranks]
    return " and ".join(parts) or "an empty sum"


DARK = {BLUE, RED, GREEN}
"""Fills on which white text is easier to read."""
WIDTH, HEIGHT = 0.66, 0.34
"""Width and height of a courier's box, where columns and rows are 1 apart."""


def figure(frames: Sequence[Frame], title: str = "", upto: int | None = None) -> Figure:
    """Return a figure of the whole run; frames after `upto` are drawn pale."""
    P = len(frames[0].held)
    with styled():
        drawn = new_figure((1.45 * len(frames) + 0.7, 0.86 * P + 0.9))
        ax = drawn.subplots()
        for place, frame in enumerate(frames):
            pale = upto is not None and place > upto
            _draw_column(ax, place, frame, pale, current=place == upto)
        _draw_axes(ax, frames, title)
    return drawn


def describe(frames: Sequence[Frame]) -> str:
    """Return the whole run in words: the alternative text of `figure`."""
    return " ".join(frame.describe() for frame in frames)


def pictures(frames: Sequence[Frame], title: str = "") -> list[str]:
    """Return the run as HTML, one picture for each step, with its words."""
    return [as_html(figure(frames, title, n), frame.describe()) for n, frame in enumerate(frames)]


def play(frames: Sequence[Frame], title: str = "") -> None:
    """Show the steps in a player with a Play button and a slider."""
    still = f"steps 0 to {len(frames) - 1}: run this cell to play them; below, they are side by side"
    play_steps(lambda: pictures(frames, title), "step", {"text/plain": still})


ROWS = ("computes, waits", "K/V", "courier")
"""The rows of `lanes`: the rank's computations, and the K/V and couriers that it has sent."""


def lanes(traces: Mapping[str, Trace], rank: int = 0) -> Figure:
    """Return one rank's timeline in each run: computations, and below them K/V and couriers in transit."""
    charts = {name: chart(trace) for name, trace in traces.items()}
    with styled():
        drawn = new_figure((8.0, 1.35 * len(charts) + 1.3))
        axes = drawn.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0]
        for ax, (name, one) in zip(axes, charts.items(), strict=True):
            for row, bar in _of_rank(one, rank):
                span, look = [(bar.start, bar.end - bar.start)], LOOKS[bar.kind]
                ax.broken_barh(span, (row + 0.1, 0.8), linewidth=0.5, **look)
                if bar.kind not in ("wait", "still"):
                    colour = TEXT.get(bar.kind, INK)
                    middle = (bar.start + bar.end) / 2, row + 0.53
                    ax.text(*middle, bar.short, ha="center", va="center", fontsize=8.5, color=colour)
            ax.axvline(one.makespan, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
            ax.set_yticks([row + 0.5 for row in range(len(ROWS))], ROWS, fontsize=9)
            ax.set(xlim=(0, 1.004 * max(each.makespan for each in charts.values())), ylim=(len(ROWS), 0))
            ax.grid(visible=False, axis="y")
            ax.tick_params(axis="y", length=0)
            ax.set_title(f"{name}: rank {rank} ends at {in_unit(one.makespan, 1)} s", fontsize=10.5)
        axes[-1].set_xlabel("time (s)")
        words = WORDS | {"transit": "in transit, posted in step …", "still": "arrived, not yet taken"}
        kinds = {bar.kind for one in charts.values() for _, bar in _of_rank(one, rank)}
        keys = [panel.patch(label=word, **LOOKS[kind]) for kind, word in words.items() if kind in kinds]
        drawn.legend(handles=keys, loc="outside lower center", ncols=2, fontsize=8.5)
    return drawn


def describe_lanes(traces: Mapping[str, Trace], rank: int = 0) -> str:
    """Return the timelines in words: the alternative text of `lanes`."""
    told = []
    for name, trace in traces.items():
        one = chart(trace)
        at = {"wait": "waits", "K/V": "K/V in transit", "courier": "couriers in transit"}
        spans: dict[str, list[str]] = {key: [] for key in at}
        for row, bar in _of_rank(one, rank):
            key = ROWS[row] if bar.kind == "transit" else bar.kind
            spans.get(key, []).append(f"{bar.start:g} to {bar.end:g}")
        parts = "; ".join(f"{what} {', '.join(spans[key])}" for key, what in at.items())
        told.append(f"{name}, rank {rank}, seconds: computes {one.busy(rank):g} in all; {parts}.")
    return " ".join(told)


def _of_rank(one: Chart, rank: int) -> list[tuple[int, Bar]]:
    """Return the bars of a rank, each with its row in `ROWS`."""
    own = [bar for bar in one.bars if bar.rank == rank and bar.end > bar.start]
    travels = {bar: bar.kind in ("transit", "still") for bar in own}
    return [(0 if not travels[bar] else 2 if bar.label.startswith(COURIERS) else 1, bar) for bar in own]


def astray(frame: Frame, rank: int) -> bool:
    """Return whether the sum on `rank` is wrong: it mixes blocks, counts one twice, or is on a wrong rank."""
    sums = frame.sums[rank]
    if sums is None:
        return frame.home
    owners = np.flatnonzero(sums.any(axis=0))
    strange = frame.home and not np.array_equal(owners, [rank])
    return bool(len(owners) > 1 or (sums > 1).any() or strange)


def _draw_column(ax: Axes, place: int, frame: Frame, pale: bool, current: bool) -> None:
    for rank, sums in enumerate(frame.sums):
        alpha = 0.15 if pale else 1.0
        if frame.held[rank] is not None:
            ax.text(
                place,
                rank - 0.32,
                f"K/V {frame.held[rank]} here",
                ha="center",
                fontsize=7.5,
                color=QUIET,
                alpha=alpha,
            )
        if sums is not None:
            _draw_courier(ax, place, rank, frame, alpha, current)
        if sums is not None and frame.to[rank] is not None:
            _draw_hop(ax, place, rank, frame, alpha)


def _draw_courier(ax: Axes, place: int, rank: int, frame: Frame, alpha: float, current: bool) -> None:
    """Draw a box with a place for each contributor; numbers name the blocks whose gradients it added."""
    sums, wrong = frame.sums[rank], astray(frame, rank)
    assert sums is not None
    P = len(sums)
    left, width = place - WIDTH / 2, WIDTH / P
    for contributor in range(P):
        owners = [
            str(owner) for owner in np.flatnonzero(sums[contributor]) for _ in range(sums[contributor, owner])
        ]
        fill = rank_colour(contributor) if owners else PAPER
        corner = left + contributor * width, rank - HEIGHT / 2
        panel.add_rectangle(
            ax, corner, width, HEIGHT, facecolor=fill, edgecolor=RULE, linewidth=0.6, alpha=alpha
        )
        colour = PAPER if fill in DARK else INK
        size = 8.5 if len(owners) < 2 else min(8.5, 24.0 / P)  # three numbers fill a place
        ax.text(
            corner[0] + width / 2,
            rank,
            ",".join(owners[:3]),
            ha="center",
            va="center",
            fontsize=size,
            color=colour,
            alpha=alpha,
        )
    edge, heavy = (RED if wrong else INK), 2.2 if wrong or current else 1.0
    outline = panel.rectangle(
        (left, rank - HEIGHT / 2), WIDTH, HEIGHT, fill=False, edgecolor=edge, linewidth=heavy, alpha=alpha
    )
    if wrong:
        outline.set_linestyle((0, (3, 1.5)))
    ax.add_patch(outline)


def _draw_hop(ax: Axes, place: int, rank: int, frame: Frame, alpha: float) -> None:
    """Draw an arrow to the next column; an arrow between the first and last rank crosses the edges."""
    to, P = frame.to[rank], len(frame.held)
    assert to is not None
    step = 1 if to == (rank + 1) % P else -1
    style = {
        "arrowstyle": "-|>,head_width=0.2,head_length=0.4",
        "color": QUIET,
        "linewidth": 1.1,
        "alpha": alpha,
    }
    start, end = (place + WIDTH / 2, rank), (place + 1 - WIDTH / 2, to)
    if abs(to - rank) == 1:
        ax.annotate("", xy=end, xytext=start, arrowprops=style)
        return
    middle = place + 0.5
    ax.plot([start[0], middle], [rank, rank + step * 0.55], color=QUIET, linewidth=1.1, alpha=alpha)
    ax.annotate("", xy=end, xytext=(middle, to - step * 0.55), arrowprops=style)


def _draw_axes(ax: Axes, frames: Sequence[Frame], title: str) -> None:
    P = len(frames[0].held)
    names = ["returned" if frame.home else f"step {frame.step}" for frame in frames]
    ax.set_xticks(range(len(frames)), names, fontsize=9)
    ax.set_yticks(range(P), [f"rank {rank}" for rank in range(P)], fontsize=9)
    ax.set(xlim=(-0.5, len(frames) - 0.5), ylim=(P - 0.35, -0.65))
    panel.bare(ax)
    ax.set_title(title)
    keys = [panel.patch(facecolor=rank_colour(rank), label=f"added by rank {rank}") for rank in range(P)]
    key = "A box is a courier when its rank sends it on. A number says whose block a term belongs to."
    if P > 2:
        first, last = (P - 1, 0) if frames[0].to[0] == 1 else (0, P - 1)
        key += (
            f"\nAn arrow that leaves the picture enters on the other side: rank {first} sends to rank {last}."
        )
    if any(astray(frame, rank) for frame in frames for rank in range(P)):
        key += "\nDashed: the sum mixes blocks, counts one twice, or is on the wrong rank."
    look = {"ncols": min(P, 4), "fontsize": 8.5, "title": key, "title_fontsize": 8.5}
    ax.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, -0.1), **look)
