"""Show whether communication is hidden: one rank's computing and sending in each step, and the threshold.

The timeline is a simulation of the real ring program (`ringlab.cost.simulate`). The curve and the threshold
come from `ringlab.cost.traffic`. Units are seconds, bytes per second in one direction, and FLOP/s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.comm.trace import Trace
from ringlab.cost.hardware import Hardware, Link
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import block_s, hop_s, least_tokens_hidden
from ringlab.errors import CostError
from ringlab.layout import contiguous, zigzag
from ringlab.viz import gantt
from ringlab.viz.frontend import import_widgets, show_player
from ringlab.viz.gantt_chart import MESSAGES, chart, in_unit, time_unit
from ringlab.viz.style import INK, ORANGE, PAPER, RED, SKY, as_html, new_figure, show, styled
from ringlab_course.figures import panel
from ringlab_course.figures.papers import known_links

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OWN = "own values"
LOOKS: dict[str, dict[str, Any]] = {
    "block": {"facecolor": SKY, "edgecolor": PAPER},
    "hop": {"facecolor": ORANGE, "edgecolor": PAPER},
    "exposed": {"facecolor": PAPER, "edgecolor": RED, "hatch": "/////"},
}
MOST_RANKS, MOST_TOKENS = 16, 2**24
TOKENS = tuple(int(2 ** (power / 2)) // 2 * 2 for power in range(12, 41))
"""The slider's choices of tokens per rank, 64 to a million: even numbers, two in each doubling."""
MHA = Attention(H=32, K=32, D=128, causal=False)
"""32 query heads and 32 key/value heads, without a mask, as in the published thresholds."""


@dataclass(frozen=True)
class Overlap:
    """A ring whose ranks hold L tokens each, compute F FLOP/s and send beta bytes/s in one direction."""

    L: int
    F: float
    beta: float
    P: int
    sizes: Attention
    latency_s: float
    trace: Trace
    makespan_s: float
    exposed_s: float

    @property
    def block_s(self) -> float:
        """The seconds of one block."""
        return block_s(self.sizes, self.L, self.F)

    @property
    def hop_s(self) -> float:
        """The seconds of one hop."""
        return hop_s(self.sizes, self.L, self.beta, self.latency_s)

    @property
    def threshold(self) -> float:
        """The tokens per rank from which a hop is hidden behind a block."""
        return least_tokens_hidden(self.F, self.beta, self.sizes, latency_s=self.latency_s)

    @property
    def hidden(self) -> bool:
        """Whether a hop takes no longer than a block."""
        return self.L >= self.threshold


def overlap(
    L: int, F: float, beta: float, P: int = 4, sizes: Attention = MHA, latency_s: float = 0.0
) -> Overlap:
    """Return the simulated forward of a ring of `P` ranks with `L` tokens each.

    The layout is zig-zag if `sizes` is causal, and contiguous otherwise. Computing takes time for visible pairs
    only.
    Raises: CostError for rates that are not above 0, P outside 2 to 16, L outside P to 2²⁴, or odd L if
    causal.
    """
    from ringlab.cost.simulate import simulate

    if not 2 <= P <= MOST_RANKS:
        raise CostError(f"2 to {MOST_RANKS} ranks in a picture", f"P={P}")
    if not isinstance(L, int) or not P <= L <= MOST_TOKENS or (sizes.causal and L % 2):
        even = ", even for a balanced causal layout" if sizes.causal else ""
        raise CostError(f"{P} to {MOST_TOKENS:,} tokens per rank, an integer{even}", f"L={L!r}")
    link = Link("the link", beta, latency_s, "chosen")
    machine = Hardware("chosen", "chosen", P, 1.0, 1.0, {sizes.dtype: F}, link, link, "chosen")
    layout = (zigzag if sizes.causal else contiguous)(L * P, P)
    run = simulate(sizes, layout, machine, tile=None)
    return Overlap(L, F, beta, P, sizes, latency_s, run.trace(), run.makespan_s, run.exposed_s)


def presets() -> dict[str, tuple[float, float]]:
    """Return (dense bfloat16 FLOP/s, bytes/s in one direction) by link of known machines.

    The links are those inside a node and between nodes.
    """
    return {known.name: (known.F, known.link.bytes_per_s) for known in known_links()}


def figure(
    L: int, F: float, beta: float, P: int = 4, sizes: Attention = MHA, latency_s: float = 0.0
) -> Figure:
    """Return a picture of the steps of rank 0, and below them the seconds of a block and of a hop against L.

    Raises: CostError as `overlap` does.
    """
    seen = overlap(L, F, beta, P, sizes, latency_s)
    with styled():
        drawn = new_figure((8.0, 5.1))
        upper, lower = drawn.subplots(2, 1, height_ratios=(1, 1.6))
        draw_steps(upper, seen)
        draw_threshold(lower, seen)
        _legend(drawn, seen)
    return drawn


def draw_steps(ax: Axes, seen: Overlap) -> None:
    """Draw the steps of rank 0: blocks above, hops below, and hatched bars for waiting."""
    scale, unit = time_unit(seen.makespan_s)
    for event in seen.trace.computes(0):
        _bar(ax, event.start, event.end, 0, scale, seen, "block", f"step {event.label.split()[-1]}")
    for hop in seen.trace.exchanges(0):
        _bar(ax, hop.posted, hop.posted + seen.hop_s, 1, scale, seen, "hop", f"hop {hop.index}")
        if hop.exposed > 0:
            _bar(ax, hop.waited, hop.done, 0, scale, seen, "exposed", "waits")
    ax.set(xlim=(0, 1.002 * seen.makespan_s / scale), ylim=(1.5, -0.5), xlabel=f"time ({unit})")
    ax.set_yticks([0, 1], ["rank 0 computes", "a block travels"])
    ax.set_title(f"{_machine(seen)}\n{_verdict(seen)}\n{_ring(seen)}", fontsize=11)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)


def draw_threshold(ax: Axes, seen: Overlap) -> None:
    """Draw the seconds of a block and of a hop against the tokens per rank, and where they cross."""
    from matplotlib.ticker import LogLocator

    at = seen.threshold
    least, most = sorted((seen.L, at))
    margin = max(8.0, (most / least) ** 0.35)
    low, high = least / margin, most * margin
    tokens = np.geomspace(low, high, 60)
    blocks = [block_s(seen.sizes, L, seen.F) for L in tokens]
    hops = [hop_s(seen.sizes, L, seen.beta, seen.latency_s) for L in tokens]
    ax.plot(tokens, blocks, color=SKY, linewidth=3)
    ax.plot(tokens, hops, color=ORANGE, linestyle="--")
    ax.fill_between(
        tokens,
        blocks,
        hops,
        where=tokens <= at * 1.02,
        facecolor=PAPER,
        edgecolor=RED,
        hatch="////",
        linewidth=0,
    )
    ax.plot((at, at), (min(*blocks, *hops), block_s(seen.sizes, at, seen.F)), color=INK, linewidth=1.2)
    for seconds, colour in ((seen.block_s, SKY), (seen.hop_s, ORANGE)):
        ax.plot([seen.L], [seconds], "o", color=colour, markersize=8, markeredgecolor=INK, zorder=4)
    bottom, top = min(*blocks, *hops), max(*blocks, *hops)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, top))
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 3000 else (1,)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    ax.yaxis.set_major_formatter(lambda value, _: _seconds(value))
    ax.minorticks_off()
    ax.tick_params(labelsize=9)
    ax.set_xlabel(f"tokens per rank, L; the dots are at L = {seen.L:,}")
    ax.set_ylabel("time per step")
    ax.text(0.02, 0.95, "exposed: the hop takes longer", transform=ax.transAxes, va="top", color=RED)
    left = float(np.log(at / low) / np.log(high / low))  # the share of the axis to the left of the threshold
    hidden = "hidden: the block takes longer" if left < 0.62 else "hidden"
    ax.text(0.98, 0.05, hidden, transform=ax.transAxes, ha="right")
    flag: Any = {"textcoords": "offset points", "fontweight": "bold", "va": "bottom"}
    side = 1 if left < 0.35 else -1
    ax.annotate(
        f"threshold: {at:,.0f} tokens",
        (at, bottom),
        (6 * side, 26),
        ha="left" if side > 0 else "right",
        **flag,
    )


def describe(
    L: int, F: float, beta: float, P: int = 4, sizes: Attention = MHA, latency_s: float = 0.0
) -> str:
    """Return the picture in words: its alternative text."""
    seen = overlap(L, F, beta, P, sizes, latency_s)
    return (
        f"{L:,} tokens on each of {P} ranks, {sizes.H} query and {sizes.K} key/value heads, "
        f"{'causal and balanced' if sizes.causal else 'no mask'}, {sizes.dtype}, {_rate(F, 'FLOP/s')}, {_rate(beta, 'B/s')} one way: "
        f"a block takes {_seconds(seen.block_s)}, a hop {_seconds(seen.hop_s)}. {_verdict(seen)}. "
        f"A hop is hidden from {seen.threshold:,.0f} tokens per rank. "
        f"The ring takes {_seconds(seen.makespan_s)}, {_seconds(seen.exposed_s)} of it exposed communication."
    )


def player(L: int = 1024, preset: str = "A100, NVLink 3", P: int = 4, sizes: Attention = MHA) -> Any:
    """Return a widget with known machines, and sliders for L, F, beta, P and the heads that share K and V."""
    ipywidgets = import_widgets()

    late = {"continuous_update": False}
    tokens = ipywidgets.SelectionSlider(options=TOKENS, value=L, description="L (tokens)", **late)
    ranks = ipywidgets.IntSlider(value=P, min=2, max=8, description="P (ranks)", **late)
    groups = [group for group in range(1, sizes.H + 1) if sizes.H % group == 0]
    group = ipywidgets.SelectionSlider(
        options=groups, value=sizes.H // sizes.K, description="GQA H/K", **late
    )
    causal = ipywidgets.Checkbox(value=sizes.causal, description="causal, balanced")
    picture = ipywidgets.HTML()

    def redraw(_: object = None) -> None:
        now = replace(sizes, K=sizes.H // group.value, causal=causal.value)
        given = tokens.value, flops.value, bandwidth.value, ranks.value, now
        picture.value = as_html(figure(*given), describe(*given))

    machine, chosen, flops, bandwidth = _rates(preset, redraw)
    for control in (tokens, ranks, group, causal):
        control.observe(redraw, names="value")
    redraw()
    rows = [[machine, chosen], [flops, bandwidth], [tokens, ranks], [group, causal]]
    return ipywidgets.VBox([*(ipywidgets.HBox(row) for row in rows), picture])


def _rates(preset: str, changed: Callable[[], None]) -> tuple[Any, Any, Any, Any]:
    """Return controls for the machine, its full name, F and beta.

    Choosing a machine sets F and beta; moving F or beta deselects the machine.
    """
    ipywidgets = import_widgets()

    known = presets()
    late = {"continuous_update": False}
    names = {"options": [OWN, *known], "value": preset, "description": "machine"}
    machine = ipywidgets.SelectionSlider(**names, readout=False, **late)
    chosen = ipywidgets.Label(preset)  # the slider's own readout would cut off long names
    log: dict[str, Any] = {"base": 10, "step": 0.05, "readout_format": ".3g", **late}
    F, beta = known[preset]
    flops = ipywidgets.FloatLogSlider(value=F, min=10, max=16, description="F (FLOP/s)", **log)
    bandwidth = ipywidgets.FloatLogSlider(value=beta, min=7, max=12.5, description="β (bytes/s)", **log)
    filling: list[bool] = []

    def fill(change: dict[str, Any]) -> None:
        chosen.value = change["new"]
        if change["new"] != OWN:
            filling.append(True)
            flops.value, bandwidth.value = known[change["new"]]
            filling.clear()
            changed()

    def own(_: object) -> None:
        if not filling:
            machine.value = OWN
            changed()

    machine.observe(fill, names="value")
    for control in (flops, bandwidth):
        control.observe(own, names="value")
    return machine, chosen, flops, bandwidth


def play(L: int = 1024, preset: str = "A100, NVLink 3", P: int = 4, sizes: Attention = MHA) -> None:
    """Show the player if a person can use it, otherwise the picture at the same values."""
    if preset not in presets():
        raise CostError(f"one of the machines {'; '.join(presets())}", repr(preset))
    given = L, *presets()[preset], P, sizes
    show_player(lambda: player(L, preset, P, sizes), lambda: show(figure(*given), describe(*given)))


def _bar(
    ax: Axes, start: float, end: float, lane: int, scale: float, seen: Overlap, kind: str, text: str
) -> None:
    ax.barh(lane, (end - start) / scale, 0.62, left=start / scale, linewidth=0.6, gid=kind, **LOOKS[kind])
    if (end - start) / seen.makespan_s * 6.9 * 72 >= 6.2 * (len(text) + 1):
        plate = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.2} if kind == "exposed" else None
        middle = (start + end) / 2 / scale
        ax.text(middle, lane, text, ha="center", va="center", fontsize=9, color=INK, bbox=plate)


def _machine(seen: Overlap) -> str:
    """Return the rates, with the name of the known machine that has them, if any."""
    names = [f"{name}, " for name, rates in presets().items() if rates == (seen.F, seen.beta)]
    return f"{''.join(names[:1])}{_rate(seen.F, 'FLOP/s')}, {_rate(seen.beta, 'B/s')} one way"


def _ring(seen: Overlap) -> str:
    """Return the ranks, their tokens and the heads in words."""
    sizes = seen.sizes
    heads = f"{sizes.H} heads" if sizes.H == sizes.K else f"{sizes.H} query and {sizes.K} K/V heads"
    mask = "causal, balanced" if sizes.causal else "no mask"
    return f"{seen.P} ranks of {seen.L:,} tokens, {heads}, D = {sizes.D}, {mask}"


def _verdict(seen: Overlap) -> str:
    ratio = seen.hop_s / seen.block_s
    times = f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}" if ratio > 1 else f"{ratio:.2g}"
    if seen.hidden:
        return f"Hidden: a hop takes {times} × a block"
    share = seen.exposed_s / seen.makespan_s
    return f"Exposed: a hop takes {times} × a block; {share:.0%} of the time is waiting"


def _seconds(seconds: float) -> str:
    scale, unit = time_unit(seconds)
    return f"{in_unit(seconds, scale)} {unit}"


def _rate(value: float, unit: str) -> str:
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:,.4g} {letter}{unit}"
    return f"{value:,.4g} {unit}"


def _legend(drawn: Figure, seen: Overlap) -> None:
    words = {
        "block": f"a block, here {_seconds(seen.block_s)}: × 4 for twice L",
        "hop": f"a hop, here {_seconds(seen.hop_s)}: × 2 for twice L",
        "exposed": "exposed: the rank waits",
    }
    patches = [panel.patch(label=words[kind], **look) for kind, look in LOOKS.items()]
    drawn.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=9)


def spreading_wait(trace: Trace) -> None:
    """Show how the wait at a border of two nodes spreads: ranks 4 to 8 in the first 800 µs, without messages."""
    ranks, until = range(4, 9), 800e-6
    one = chart(trace)
    one = replace(one, bars=tuple(bar for bar in one.bars if bar.kind not in MESSAGES))
    with styled():
        drawn = new_figure((8.0, 4.4))
        ax = drawn.subplots()
        gantt.draw(ax, one, ranks, until, "The wait spreads to ranks 7, 6, 5, 4")
        scale, unit = time_unit(until)
        ax.set_xlabel(f"time ({unit})")
        middle = gantt.COMPUTE[0] + gantt.COMPUTE[1] / 2
        ax.set_yticks([row + middle for row in range(5)], [f"node {r // 8}, rank {r}" for r in ranks])
        ax.axhline(3.99, color=INK, linewidth=1.6)
        ax.text(
            until / scale,
            3.97,
            "the border, over InfiniBand",
            ha="right",
            va="bottom",
            fontsize=8.5,
            color=INK,
        )
        places = []
        for place, rank in reversed([*enumerate(ranks)][:-1]):
            wait = min(
                (bar for bar in one.bars if bar.rank == rank and bar.kind == "wait"),
                key=lambda bar: bar.start,
            )
            places.append(((wait.start + wait.end) / 2 / scale, place + middle))
        for begin, end in pairwise(places):
            arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 2.2, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", xy=end, xytext=begin, arrowprops=arrow, zorder=6)
        kinds = ("forward", "wait")
        handles = [panel.patch(label=gantt.WORDS[kind], **gantt.LOOKS[kind]) for kind in kinds]
        drawn.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8.5)
    words = (
        " Shown are ranks 4 to 8 in the first 800 µs, without messages. A line parts ranks 7 and 8. Arrows lead "
        "from the first wait of rank 7 to the first waits of ranks 6, 5 and 4, each later than the one before."
    )
    show(drawn, gantt.describe(trace, "A wait spreads") + words)
