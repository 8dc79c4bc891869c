"""Online softmax of one query row, block by block: the running maximum, the rescaling, and the result so far.

`stream` computes the data of the pictures, a list of `Step`, with NumPy alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        if seen:
            ax.hlines(step.maximum, keys[0] - 0.5, keys[-1] + 0.5, color=INK, linewidth=2)
        ax.text(keys.mean(), top, f"{step.block + 1}", ha="center", fontsize=9, color=INK if seen else QUIET)
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set(
        title=f"Scores of one query, in {len(steps)} blocks",
        xlabel="key (numbers on top: blocks; black line: maximum m)",
        ylabel="score",
        xlim=(-0.7, len(scores) - 0.3),
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


def draw_result(ax: Axes, steps: Sequence[Step], upto: int) -> None:
    """Draw the output after every block, and the exact answer as a dashed line."""
    seen = steps[: upto + 1]
    ax.plot([step.block for step in seen], [step.out for step in seen], "o-", color=QUIET)
    ax.axhline(steps[-1].out, color=INK, linestyle="--", linewidth=1.2)
    outs = [step.out for step in steps]
    margin = 0.25 * (max(outs) - min(outs) or 1.0)
    ax.set(
        title="Output so far",
        xlabel="blocks seen",
        ylabel="out (dashed: over all keys)",
        xlim=(-0.6, len(steps) - 0.4),
        ylim=(min(outs) - margin, max(outs) + margin),
    )
    ax.set_xticks(range(len(steps)), [str(step.block + 1) for step in steps])


def stream_figure(scores: np.ndarray, values: np.ndarray, block: int, upto: int | None = None) -> Figure:
    """Return the three pictures after `upto` + 1 blocks, or after all blocks if `upto` is None."""
    steps = stream(scores, values, block)
    upto = len(steps) - 1 if upto is None else upto
    with styled():
        figure = new_figure((11.2, 3.6))
        figure.set_layout_engine("constrained", wspace=0.05)
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.35, 1.1, 0.9))
        draw_scores(left, scores, steps, block, upto)
        draw_shares(middle, steps, upto)
        draw_result(right, steps, upto)
    return figure


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
