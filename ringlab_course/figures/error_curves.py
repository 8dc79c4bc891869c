"""Curves of ring attention's relative error over the number of blocks, by dtype and by the rounded quantity.

Each point is the mean of measured errors over SEEDS. Every run computes attention in P blocks, which it
merges in the order of a ring, with one quantity rounded or wrong, and compares the result with the float64
oracle. There is one head: q is (rows, D), k and v are (S, D), and s = q·k / √D.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ringlab import oracle
from ringlab.merge import Partial, merge
from ringlab.viz.style import BLUE, GREEN, INK, ORANGE, QUIET, RED, new_figure, styled
from ringlab_course.figures.labels import apart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


RANKS = (1, 2, 4, 8, 16, 32)
PROBES = ("plain", "large", "sloped")
"""Kinds of inputs: scores of size 1, of size `gain`, or scores that rise along the keys by 2 · `slope`."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TILE = 32
"""The number of keys that a block adds to its accumulator at a time."""


@dataclass(frozen=True)
class Program:
    """A blockwise attention: the quantities that it rounds to `dtype`, and its mistakes.

    Its inputs and its blocks' outputs are rounded to `dtype` in any case.
    """

    dtype: torch.dtype = torch.bfloat16
    lse: bool = False
    out: bool = False
    accumulator: bool = False
    q: bool = False
    fp16_exponentials: bool = False
    rescales: bool = True
    shuffles: bool = False

    def rounded(self, x: Tensor, really: bool) -> Tensor:
        """Return `x` rounded to `dtype`, in float32, or `x` unchanged if not `really`."""
        return x.to(self.dtype).float() if really else x


FAULTS = {
    "sound": Program(),
    "bf16 lse": Program(lse=True),
    "bf16 out": Program(out=True),
    "bf16 accumulator": Program(accumulator=True),
    "bf16 q": Program(q=True),
    "fp16 overflow": Program(fp16_exponentials=True),
    "no rescale": Program(rescales=False),
    "arrival order": Program(shuffles=True),
}
"""Named programs in bfloat16; the names are those of exercise 10."""


def inputs(
    probe: str,
    seed: int,
    *,
    rows: int = 64,
    S: int = 1024,
    D: int = 64,
    gain: float = 8.0,
    slope: float = 10.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 q (rows, D), k and v (S, D) of one kind of PROBES.

    Raises: ValueError for another kind.
    """
    if probe not in PROBES:
        raise ValueError(f"one of {', '.join(PROBES)}, not {probe!r}")
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, D, generator=generator) for n in (rows, S, S))
    if probe == "large":
        q = q * gain
    elif probe == "sloped":
        q[:, 0] = math.sqrt(D)
        k[:, 0] = torch.linspace(-slope, slope, S)
    return q, k, v


def run(
    program: Program, q: Tensor, k: Tensor, v: Tensor, P: int, generator: torch.Generator | None = None
) -> Tensor:
    """Return out (rows, D), float32, of attention in P blocks of keys, folded in order.

    The inputs are not rounded here. `generator` draws the order of the blocks for a program that shuffles.
    """
    blocks = list(zip(k.float().tensor_split(P), v.float().tensor_split(P), strict=True))
    if program.shuffles:
        blocks = [blocks[i] for i in torch.randperm(P, generator=generator).tolist()]
    if not program.rescales:
        return _never_rescaled(program, q.float(), blocks)
    state = Partial(torch.zeros(q.shape), torch.full(q.shape[:1], -math.inf))
    for keys, values in blocks:
        out, lse = _block(program, q.float(), keys, values)
        part = Partial(program.rounded(out, True), program.rounded(lse, program.lse))
        state = merge(state, part)
        state = Partial(program.rounded(state.out, program.out), program.rounded(state.lse, program.lse))
    return state.out


def relative_error(x: Tensor, truth: np.ndarray) -> float:
    """Return ‖x − truth‖ / ‖truth‖ over all entries, or inf if x is not finite."""
    got = oracle.float64(x)
    if not np.isfinite(got).all():
        return math.inf
    return float(np.linalg.norm(got - truth) / np.linalg.norm(truth))


def truth(q: Tensor, k: Tensor, v: Tensor) -> np.ndarray:
    """Return the oracle's out (rows, D) for these inputs, which are not rounded here."""
    return oracle.attention(q[None, None], k[None, None], v[None, None]).out[0, 0]


def errors(
    program: Program, probe: str, ranks: Sequence[int] = RANKS, *, seed: int = 0, **sizes: Any
) -> list[float]:
    """Return the relative error of `program` in P blocks, for every P of `ranks`.

    The inputs are those of `seed`; `sizes` are passed to `inputs`.
    """
    q, k, v = (x.to(program.dtype) for x in inputs(probe, seed, **sizes))
    right, order = truth(q, k, v), torch.Generator().manual_seed(seed)
    with _one_thread():
        return [relative_error(run(program, q, k, v, P, order), right) for P in ranks]


def curves(fault: str, ranks: Sequence[int] = RANKS, *, seed: int = 0, **sizes: Any) -> dict[str, np.ndarray]:
    """Return the error curves of a program of FAULTS: an array over `ranks` for every probe, and "repeat".

    "repeat" is the relative difference of two runs on the same plain inputs. `sizes` are passed to `inputs`.
    """
    program = FAULTS[fault]
    found = {probe: np.array(errors(program, probe, ranks, seed=seed, **sizes)) for probe in PROBES}
    q, k, v = (x.to(program.dtype) for x in inputs("plain", seed, **sizes))
    order = torch.Generator().manual_seed(seed)
    with _one_thread():
        pairs = [(run(program, q, k, v, P, order), run(program, q, k, v, P, order)) for P in ranks]
    return {
        **found,
        "repeat": np.array([relative_error(again, oracle.float64(once)) for once, again in pairs]),
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread.

    On a busy machine, several threads of such small operations wait for each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _block(program: Program, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of these queries over one block of keys."""
    scale = q.shape[-1] ** -0.5
    if program.q:  # scale and log2(e) are folded into q, as in kernels, but q is rounded afterwards
        scores = program.rounded(q * (scale / math.log(2)), True) @ k.T * math.log(2)
    else:
        scores = q @ k.T * scale
    if program.fp16_exponentials:  # the maximum is not subtracted
        powers = torch.exp(scores).half().float()
        total = powers.sum(-1)
        return powers @ v / total[:, None], total.log()
    maximum = scores.amax(-1)
    powers = torch.exp(scores - maximum[:, None])
    total, acc = powers.sum(-1), powers @ v
    if program.accumulator:
        total, acc = _added_up(program, powers, v)
    return acc / total[:, None], maximum + total.log()


def _added_up(program: Program, powers: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ powers and powers @ v, added TILE keys at a time and rounded after every addition."""
    total, acc = torch.zeros(len(powers)), torch.zeros(len(powers), v.shape[-1])
    for weights, values in zip(powers.split(TILE, -1), v.split(TILE), strict=True):
        total = program.rounded(total + weights.sum(-1), True)
        acc = program.rounded(acc + weights @ values, True)
    return total, acc


def _never_rescaled(program: Program, q: Tensor, blocks: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return `out` from a program that rescales its sum, but not its accumulator, when the maximum rises."""
    maximum, total, acc = torch.full(q.shape[:1], -math.inf), torch.zeros(len(q)), torch.zeros(q.shape)
    for keys, values in blocks:
        out, lse = _block(program, q, keys, values)
        new = torch.maximum(maximum, lse)
        total = total * torch.exp(maximum - new) + torch.exp(lse - new)
        acc = acc + torch.exp(lse - new)[:, None] * program.rounded(out, True)
        maximum = new
    return acc / total[:, None]


SEEDS = (0, 1, 2)
ROUNDED = ("nothing", "out", "lse")
"""The part of the running state that is rounded to the dtype of the inputs."""
TITLES = {"plain": "plain scores", "large": "large scores", "sloped": "sloped scores"}
LOOKS = {"lse": (RED, "s"), "out": (ORANGE, "^"), "nothing": (BLUE, "o")}
RANGES = {"bf16": (5e-4, 6e-2), "fp16": (6e-5, 7e-3)}
"""The range of relative errors that a panel shows, about two powers of ten, by the dtype of its inputs."""
SHAPES = {
    "sound": (BLUE, "o"),
    "bf16 out": (ORANGE, "^"),
    "bf16 accumulator": (GREEN, "v"),
    "bf16 q": (INK, "D"),
}
MARKS = "osD"
TOP = 40.0
"""The upper edge of the panels of `fault_figure`."""


@dataclass(frozen=True)
class Panel:
    """One kind of inputs and one dtype: mean errors over `ranks`, by the rounded part of the state."""

    probe: str
    dtype: str
    ranks: tuple[int, ...]
    errors: Mapping[str, tuple[float, ...]]

    def growth(self, rounded: str) -> float:
        """Return the error at the most blocks, divided by the error at the fewest blocks above one."""
        first = next(i for i, P in enumerate(self.ranks) if P > 1)
        return self.errors[rounded][-1] / self.errors[rounded][first]


@functools.cache
def panel(
    probe: str, dtype: str = "bf16", ranks: tuple[int, ...] = RANKS, seeds: tuple[int, ...] = SEEDS
) -> Panel:
    """Return the measured errors for these inputs and this dtype.

    Raises: ValueError for unknown inputs, KeyError for an unknown dtype.
    """
    programs = {each: Program(DTYPES[dtype], lse=each == "lse", out=each == "out") for each in ROUNDED}
    found = {each: _mean(program, probe, ranks, seeds) for each, program in programs.items()}
    return Panel(probe, dtype, ranks, found)


def _mean(program: Program, probe: str, ranks: Sequence[int], seeds: Sequence[int]) -> tuple[float, ...]:
    runs = [errors(program, probe, ranks, seed=seed) for seed in seeds]
    return tuple(sum(column) / len(seeds) for column in zip(*runs, strict=True))


def figure(panels: Sequence[Panel]) -> Figure:
    """Return the panels, of bf16 or fp16, side by side on one logarithmic scale, with named curves."""
    with styled():
        drawing = new_figure((4.3 * len(panels) + 1.1, 4.2))
        axes = drawing.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for ax, one in zip(axes, panels, strict=True):
            _draw(ax, one)
        axes[0].set_ylabel("relative error against float64")
        title = "Error of attention in P blocks" + ", by the dtype of its state" * (len(panels) > 1)
        drawing.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return drawing


def describe(panels: Sequence[Panel]) -> str:
    """Return the panels in words: the alternative text of `figure`."""
    return " ".join(_words(one) for one in panels)


@functools.cache
def mean_errors(fault: str, probe: str, ranks: tuple[int, ...] = RANKS) -> tuple[float, ...]:
    """Return the mean relative error over SEEDS of a program of FAULTS, for every P of `ranks`."""
    return _mean(FAULTS[fault], probe, ranks, SEEDS)


def shapes(probe: str, faults: Sequence[str], title: str) -> Figure:
    """Return the mean error curves of these programs of FAULTS on one kind of inputs, each with its name."""
    with styled():
        drawing = new_figure((6.2, 3.9))
        ax = drawing.subplots()
        curves = {fault: mean_errors(fault, probe) for fault in faults}
        heights = apart([curve[-1] for curve in curves.values()], 1.25)
        for (fault, curve), height in zip(curves.items(), heights, strict=True):
            _draw_named(ax, curve, RANKS, SHAPES[fault], fault, height)
        _scale(ax, RANKS, 6e-4, 1.2e-2, digits=(1, 2, 5))
        ax.set(xlim=(RANKS[0] * 0.85, RANKS[-1] * 1.15), ylabel="relative error against float64")
        ax.set_title(f"{title}\n{TITLES[probe]}")
    return drawing


def describe_shapes(probe: str, faults: Sequence[str], title: str) -> str:
    """Return the curves of `shapes` in words."""
    curves = {fault: mean_errors(fault, probe) for fault in faults}
    spans = "; ".join(f"{fault} {curve[0]:.1e} to {curve[-1]:.1e}" for fault, curve in curves.items())
    return f"{title}. {TITLES[probe].capitalize()}, relative error from {RANKS[0]} to {RANKS[-1]} blocks: {spans}."


def fault_figure(ranks: Sequence[int], found: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Return a small panel for each named program, with its error curves by probe.

    The curves are those that exercise 10 hands out.
    """
    columns = min(4, max(1, len(found)))
    rows = math.ceil(len(found) / columns)
    with styled():
        drawing = new_figure((max(7.0, 2.65 * columns), 2.5 * rows + 0.4))  # the title is 7 inches wide
        axes = drawing.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for ax in axes[len(found) :]:
            ax.set_visible(False)
        for ax, (name, curves) in zip(axes, found.items(), strict=False):
            for index, probe in enumerate(PROBES):
                _draw_probe(ax, ranks, probe, curves[probe], index)
            if any(math.isinf(error) for probe in PROBES for error in curves[probe]):
                ax.text(ranks[0], TOP / 4, "not finite", fontsize=8.5, color=INK, va="top")
            again = max(curves["repeat"])
            note = f"two runs differ by {again:.0e}" if again else "two runs: same bits"
            ax.text(0.04, 0.05, note, transform=ax.transAxes, fontsize=8.5, color=RED if again else QUIET)
            ax.set_title(name)
            _scale(ax, ranks, 5e-5, TOP)
        for ax in axes[::columns]:
            ax.set_ylabel("relative error")
        handles, labels = axes[0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=len(labels), title="inputs")
        drawing.suptitle(
            "Programs in P blocks: how wrong each is on three kinds of inputs", x=0.01, ha="left"
        )
    return drawing


def describe_faults(ranks: Sequence[int], found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return the panels of `fault_figure` in words."""
    sentences = []
    for name, curves in found.items():
        parts = [f"{probe} {_in_words(e[0])} to {_in_words(e[-1])}" for probe, e in curves.items()]
        sentences.append(f"{name}: {', '.join(parts)}.")
    return f"Relative errors from {ranks[0]} to {ranks[-1]} blocks. " + " ".join(sentences)


def _in_words(error: float) -> str:
    """Return an error in words.

    The error of a few float32 roundings is called "rounding". Its digits are left out, because they differ between
    machines.
    """
    return "nothing" if error == 0 else "rounding" if error < 1e-5 else f"{error:.0e}"


def _draw(ax: Axes, one: Panel) -> None:
    text = f"far below: all in fp32, {_level(one):.0e}"
    ax.text(0.03, 0.03, text, transform=ax.transAxes, color=QUIET, fontsize=9.5, fontweight="bold")
    heights = apart([one.errors[rounded][-1] for rounded in ROUNDED], 1.5)
    for rounded, height in zip(ROUNDED, heights, strict=True):
        _draw_named(ax, one.errors[rounded], one.ranks, LOOKS[rounded], _label(one.dtype, rounded), height)
    ax.set_title(f"{TITLES[one.probe]}, {one.dtype}")
    _scale(ax, one.ranks, *RANGES[one.dtype], digits=(1, 2, 5))
    ax.set_xlim(one.ranks[0] * 0.85, one.ranks[-1] * 1.15)


def _draw_named(
    ax: Axes, curve: Sequence[float], ranks: Sequence[int], look: tuple[str, str], name: str, height: float
) -> None:
    """Draw one curve, and its name to the right of the panel, connected by a thin line."""
    ax.plot(ranks, curve, color=look[0], marker=look[1], markersize=6)
    ax.annotate(
        name, (ranks[-1] * 1.05, curve[-1]), (ranks[-1] * 1.3, height), color=look[0], va="center", fontsize=9.5,
        fontweight="bold", arrowprops={"arrowstyle": "-", "color": look[0], "linewidth": 0.8}, annotation_clip=False,
    )  # fmt: skip


def _level(one: Panel) -> float:
    return max(panel(one.probe, "fp32", one.ranks).errors["nothing"])


def _label(dtype: str, rounded: str) -> str:
    return f"state in fp32\n(blocks {dtype})" if rounded == "nothing" else f"{rounded} in {dtype}"


def _draw_probe(ax: Axes, ranks: Sequence[int], probe: str, errors: Sequence[float], index: int) -> None:
    """Draw the errors of one kind of inputs; infinite errors are drawn near the upper edge."""
    colour = (BLUE, RED, GREEN)[index % 3]
    shown = [TOP / 2 if math.isinf(error) else error for error in errors]
    ax.plot(ranks, shown, color=colour, marker=MARKS[index % 3], markersize=4.5, linewidth=1.5, label=probe)


def _scale(ax: Axes, ranks: Sequence[int], low: float, high: float, digits: Sequence[int] = ()) -> None:
    """Scale a panel of errors from `low` to `high`; `digits` are the ticks in every power of ten."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(list(ranks), [str(P) for P in ranks])
    if digits:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
        marks = [(digit * 10.0**power, f"{digit}e{power}") for power in powers for digit in digits]
        ax.set_yticks(*zip(*marks, strict=True))
    ax.minorticks_off()
    ax.set_ylim(low, high)
    ax.set_xlabel("P (blocks)")


def _words(one: Panel) -> str:
    spans = []
    for rounded in ROUNDED:
        first, last = one.errors[rounded][0], one.errors[rounded][-1]
        label = _label(one.dtype, rounded).replace("\n", " ")
        spans.append(f"{label} {first:.0e} to {last:.0e}")
    spans.append(f"all in fp32 below {10.0 ** math.ceil(math.log10(_level(one))):.0e}")
    span = f"{one.ranks[0]} to {one.ranks[-1]} blocks"
    return f"{TITLES[one.probe].capitalize()}, {one.dtype}, relative error from {span}: {'; '.join(spans)}."
