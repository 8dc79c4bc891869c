"""Online softmax of one query row, block by block: the running maximum, the rescaling, and the result so far.

`stream` computes the data of the pictures, a list of `Step`, with NumPy alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from ringlab.viz.frontend import play_steps
from ringlab.viz.style import HATCHES, INK, QUIET, RULE, as_html, new_figure, rank_colour, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Step:
    """The state after one block: maximum m, the factor e^(m_old − m_new), and out so far.

    `shares[i]` is the part of block i in the sum Σ e^(s − m), with the current maximum m.
    """

    block: int
    maximum: float
    factor: float
    shares: tuple[float, ...]
    out: float

    @property
    def total(self) -> float:
        """The running sum Σ e^(s − m)."""
        return sum(self.shares)

    @property
    def lse(self) -> float:
        """The running log-sum-exp, m + ln Σ e^(s − m)."""
        return self.maximum + math.log(self.total) if self.total > 0 else -math.inf


def stream(scores: Float[np.ndarray, "S"], values: Float[np.ndarray, "S"], block: int) -> tuple[Step, ...]:
    """Return the state after every block of `block` keys; the last block may be shorter."""
    steps: list[Step] = []
    shares: tuple[float, ...] = ()
    maximum, weighted = -math.inf, 0.0
    for index, start in enumerate(range(0, len(scores), block)):
        part = scores[start : start + block]
        new = max(maximum, float(part.max()))
        anchor = new if math.isfinite(new) else 0.0  # the row has seen no key yet
        factor = math.exp(maximum - anchor)
        powers = np.exp(part - anchor)
        shares = (*(share * factor for share in shares), float(powers.sum()))
        weighted = weighted * factor + float(powers @ values[start : start + block])
        total = sum(shares)
        steps.append(Step(index, new, factor, shares, weighted / total if total > 0 else 0.0))
        maximum = new
    return tuple(steps)


def example(S: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Return the fixed scores and values of the lesson's picture, with two jumps of the maximum."""
    rng = np.random.default_rng(4)
    return np.round(rng.normal(0, 1, S) + np.linspace(-0.8, 1.2, S), 1), np.round(rng.normal(0, 1, S) * 10)


def draw_scores(ax: Axes, scores: np.ndarray, steps: Sequence[Step], block: int, upto: int) -> None:
    """Draw the scores, coloured and numbered by block, and the running maximum as a staircase."""
    floor, top = scores.min() - 0.3, scores.max() + 0.25
    for step in steps:
        keys = np.arange(step.block * block, min((step.block + 1) * block, len(scores)))
        seen = step.block <= upto
        ax.bar(
            keys,
            scores[keys],
            width=0.75,
            color=rank_colour(step.block) if seen else RULE,
            hatch=HATCHES[step.block % 8] if seen else "",
            edgecolor="white",
            linewidth=0.5,
        )
        ax.plot(
            keys, scores[keys], ".", color=INK if seen else QUIET, markersize=6
        )  # a score of 0 has no bar
        ax.text(keys.mean(), top, f"{step.block + 1}", ha="center", fontsize=9, color=INK if seen else QUIET)
    edges = [min(index * block, len(scores)) - 0.5 for index in range(upto + 2)]
    levels = [step.maximum for step in steps[: upto + 1]]
    ax.stairs(levels, edges, baseline=None, color=INK, linewidth=2)
    ax.text(edges[-1] + 0.1, levels[-1], "m", va="center", fontsize=10, color=INK, fontweight="bold")
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set(
        title=f"Scores of one query, in {len(steps)} blocks",
        xlabel="key (numbers on top: blocks; line: the maximum so far, m)",
        ylabel="score",
        xlim=(-0.7, len(scores) + 0.7),
        ylim=(floor, top + 0.45),
    )
    ax.grid(visible=False, axis="x")


def draw_shares(ax: Axes, steps: Sequence[Step], upto: int) -> None:
    """Draw a stacked bar for each step: each block's share of the running sum, which shrinks at jumps."""
    for step in steps[: upto + 1]:
        bottom = 0.0
        for index, share in enumerate(step.shares):
            ax.bar(
                step.block,
                share,
                bottom=bottom,
                color=rank_colour(index),
                hatch=HATCHES[index % 8],
                edgecolor="white",
                linewidth=0.5,
            )
            bottom += share
        if step.block:
            ax.text(step.block, bottom, f"old\n×{step.factor:.2f}", ha="center", va="bottom", fontsize=8.5)
    ax.set(
        title="Sum of e^(s − m), by block",
        xlabel="blocks seen (old: all earlier parts)",
        ylabel="running sum",
        xlim=(-0.6, len(steps) - 0.4),
        ylim=(0, 1.3 * max(step.total for step in steps)),
    )
    ax.set_xticks(range(len(steps)), [str(step.block + 1) for step in steps])
    ax.grid(visible=False, axis="x")


def stream_figure(scores: np.ndarray, values: np.ndarray, block: int, upto: int | None = None) -> Figure:
    """Return a picture of scores and running sum after `upto` + 1 blocks, or after all blocks if `upto` is None."""
    steps = stream(scores, values, block)
    upto = len(steps) - 1 if upto is None else upto
    with styled():
        figure = new_figure((8.6, 3.7))
        figure.set_layout_engine("constrained", wspace=0.05)
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        draw_scores(left, scores, steps, block, upto)
        draw_shares(right, steps, upto)
    return figure


def merge_figure(outs: Sequence[float], masses: Sequence[float]) -> Figure:
    """Return a picture of partial results as bars, and of their merge as a line across all bars.

    A bar is as high as its out and as wide as its mass. The area below the line equals that of all bars.
    """
    merged = sum(out * mass for out, mass in zip(outs, masses, strict=True)) / sum(masses)
    with styled():
        figure = new_figure((7.2, 3.6))
        ax = figure.subplots()
        begin = 0.0
        for place, (name, out, mass) in enumerate(zip("abcdefgh", outs, masses, strict=False)):
            ax.bar(
                begin,
                out,
                width=mass,
                align="edge",
                color=rank_colour(place),
                hatch=HATCHES[place % 8],
                edgecolor="white",
                linewidth=1,
            )
            words = f"block {name}\nout {out:.1f}\nmass {mass:.1f}"
            plate = {"facecolor": "white", "edgecolor": "none", "pad": 3}
            ax.text(begin + mass / 2, out / 2, words, ha="center", va="center", color=INK, bbox=plate)
            begin += mass
        ax.plot((0, begin), (merged, merged), color=INK, linewidth=2.2)
        ax.text(begin * 1.01, merged, f"merged:\nout {merged:.1f}\nmass {begin:.1f}", va="center", color=INK)
        ax.set(
            title="The merge keeps the area: out × mass",
            xlabel="softmax mass of the block, Σ e^s",
            ylabel="out",
            xlim=(0, 1.2 * begin),
            ylim=(0, 1.12 * max(outs)),
        )
        ax.grid(visible=False, axis="x")
    return figure


def describe_merge(outs: Sequence[float], masses: Sequence[float]) -> str:
    """Return in words what `merge_figure` shows."""
    merged = sum(out * mass for out, mass in zip(outs, masses, strict=True)) / sum(masses)
    bars = "; ".join(
        f"block {name}: width {mass:.1f}, height {out:.1f}"
        for name, out, mass in zip("abcdefgh", outs, masses, strict=False)
    )
    return (
        f"Bars side by side, as wide as the softmax mass of a block and as high as its out. {bars}. A line across "
        f"all of them at {merged:.1f}, the merged out: the area above it equals the area that is missing below it."
    )


CHAIN, TREE = (((0, 1), 2), 3), ((0, 1), (2, 3))
"""Two ways to merge four blocks, as nested pairs."""


def orders_figure() -> Figure:
    """Return a picture of a chain and a tree that merge the same four blocks, one of which is empty."""
    with styled():
        figure = new_figure((7.6, 3.2))
        for ax, (name, way) in zip(
            figure.subplots(1, 2), (("A chain", CHAIN), ("A tree", TREE)), strict=True
        ):
            _draw_merges(ax, way)
            ax.set(xlim=(-0.6, 3.6), ylim=(-0.75, 3.45))
            ax.set_title(f"{name} of three merges", fontsize=10.5)
            ax.set_axis_off()
        figure.suptitle("Must both give the same?", x=0.01, ha="left", fontweight="bold", fontsize=11.5)
    return figure


def describe_orders() -> str:
    """Return in words what `orders_figure` shows."""
    return (
        "Four blocks a, b, c and d; c is empty, its row sees no key. Left, a chain: a and b are merged, then c is merged "
        "to the result, then d. Right, a tree: a with b, c with d, and then both results."
    )


def _draw_merges(ax: Axes, way: object, empty: int = 2) -> tuple[float, float]:
    """Draw the merges of `way` above the blocks that they merge; return the place of the last merge."""
    if isinstance(way, int):
        look: dict[str, Any] = (
            {"facecolor": RULE, "hatch": "xxx"} if way == empty else {"facecolor": rank_colour(way)}
        )
        ax.bar(way, 0.5, width=0.6, bottom=-0.25, edgecolor=QUIET, linewidth=0.8, **look)
        plate = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        ax.text(way, 0, "abcd"[way], ha="center", va="center", fontsize=9, color=INK, bbox=plate)
        if way == empty:
            ax.text(way, -0.35, "no key", ha="center", va="top", fontsize=8.5, color=INK)
        return float(way), 0.25
    assert isinstance(way, tuple)
    ends = [_draw_merges(ax, part, empty) for part in way]
    x, y = sum(end[0] for end in ends) / 2, max(end[1] for end in ends) + 0.95
    for end in ends:
        ax.plot((end[0], x), (end[1], y), color=QUIET, linewidth=1.4, zorder=1)
    ax.plot([x], [y], "o", markersize=15, color="white", markeredgecolor=INK, zorder=2)
    ax.text(x, y - 0.01, "·", ha="center", va="center", fontsize=17, fontweight="bold", color=INK, zorder=3)
    return x, y


def describe(steps: Sequence[Step], upto: int | None = None) -> str:
    """Return the run in words: the alternative text of `stream_figure`."""
    seen = steps if upto is None else steps[: upto + 1]
    return " ".join(
        f"After block {step.block + 1}: maximum {step.maximum:.1f}, old sum times {step.factor:.2f}, "
        f"sum {step.total:.2f}, out {step.out:.2f}."
        for step in seen
    )


def pictures(scores: np.ndarray, values: np.ndarray, block: int) -> list[str]:
    """Return the stream as HTML, one picture for each block, with its words."""
    return [
        as_html(stream_figure(scores, values, block, upto), describe([step]))
        for upto, step in enumerate(stream(scores, values, block))
    ]


def play(scores: np.ndarray, values: np.ndarray, block: int) -> None:
    """Show the blocks in a player with a Play button and a slider, or in words if they cannot be played."""
    steps = stream(scores, values, block)
    words = describe(steps).replace(" After", "\nAfter")
    numbers = [step.block + 1 for step in steps]
    play_steps(lambda: pictures(scores, values, block), "block", {"text/plain": words}, numbers)
