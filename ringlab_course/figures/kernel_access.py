"""A map of the memory that each program instance of a kernel reads and writes, drawn from recorded accesses.

A record is an `Access` of `ringlab_course.checking.accesses`: a program, "load" or "store", the kernel's
argument, and the offsets of the elements. `boxes` and `counts` compute the data of the pictures with NumPy
alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.viz.frontend import play_steps
from ringlab.viz.style import INK, ORANGE, PAPER, QUIET, RULE, SKY, as_html, new_figure, styled
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ringlab_course.checking.accesses import Access

Program = tuple[int, int, int]
Shapes = Mapping[str, tuple[int, int]]
"""The rows and columns of each kernel argument on the map, in the order of the panels."""
VERBS = {"load": "reads", "store": "writes"}


@dataclass(frozen=True)
class Box:
    """The rows and columns that one access touches; the last ones are included.

    turn: numbers a program's accesses of this kind to this argument, from 1.
    masked: the number of lanes that touched nothing.
    """

    argument: str
    kind: str
    turn: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    masked: int


def programs(accesses: Sequence[Access]) -> list[Program]:
    """Return the program instances that touched memory, in the order of the grid."""
    return sorted({access.program for access in accesses})


def boxes(accesses: Sequence[Access], shapes: Shapes, program: Program) -> list[Box]:
    """Return the memory that one program touches in the arguments of `shapes`, one box for each access."""
    found: list[Box] = []
    turns: dict[tuple[str, str], int] = {}
    for access in accesses:
        if access.program != program or access.argument not in shapes or not access.offsets.size:
            continue
        rows, columns = np.divmod(access.offsets.ravel(), shapes[access.argument][1])
        key = access.argument, access.kind
        turns[key] = turns.get(key, 0) + 1
        tall, wide = ((int(place.min()), int(place.max())) for place in (rows, columns))
        found.append(Box(access.argument, access.kind, turns[key], tall, wide, access.masked))
    return found


def counts(accesses: Sequence[Access], argument: str, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """Return how often all programs read ("load") or write ("store") each element of an argument."""
    times = np.zeros(shape[0] * shape[1], np.int64)
    for access in accesses:
        if access.argument == argument and access.kind == kind:
            np.add.at(times, access.offsets.ravel(), 1)
    return times.reshape(shape)


def label(argument: str) -> str:
    """Return an argument's name as people say it: k_ptr becomes K."""
    return argument.removesuffix("_ptr").upper()


def one_program(accesses: Sequence[Access], shapes: Shapes, program: Program) -> Figure:
    """Return a map of the memory that one program touches; memory that only others touch is grey."""
    mine = boxes(accesses, shapes, program)
    others = {
        argument: counts(accesses, argument, "load", shape) + counts(accesses, argument, "store", shape)
        for argument, shape in shapes.items()
    }
    with styled():
        widths = [max(0.55, min(3.0, 8 * columns / max(rows, 1))) for rows, columns in shapes.values()]
        figure = new_figure((10.0, 3.9))
        panels = figure.subplots(1, len(shapes), squeeze=False, width_ratios=widths)[0]
        for ax, (argument, shape) in zip(panels, shapes.items(), strict=True):
            _draw_map(ax, argument, shape, others[argument], [b for b in mine if b.argument == argument])
        panels[0].set_ylabel("row (token)")
        figure.suptitle(
            f"Reads and writes of program {_named(program)}",
            x=0.01,
            ha="left",
            fontweight="bold",
            fontsize=11.5,
        )
        _legend(figure, others=True)
    return figure


def all_programs(accesses: Sequence[Access], shapes: Shapes, name: str = "") -> Figure:
    """Return a panel for each argument, with a line for each program and a box for each access.

    Where a program touches an argument more than once, numbers give the order.
    Dashed boxes are masked lanes after the end of a flat argument, and tiles that other programs read but
    this one skips.
    name: the kernel's name, for the title.
    """
    instances = programs(accesses)
    with styled():
        figure = new_figure((10.4, 2.1 + 0.32 * len(instances)))
        panels = figure.subplots(1, len(shapes), squeeze=False, sharey=True)[0]
        dashed = set()
        numbered = any(box.turn > 1 for program in instances for box in boxes(accesses, shapes, program))
        for ax, (argument, shape) in zip(panels, shapes.items(), strict=True):
            length, flat = (shape[1], True) if shape[0] == 1 else (shape[0], False)
            found = {program: boxes(accesses, {argument: shape}, program) for program in instances}
            end = length
            for line, mine in enumerate(found.values()):
                for box in mine:
                    first, last = box.columns if flat else box.rows
                    _draw_line(ax, box, line, along=(first, last), numbered=numbered)
                    if flat and box.masked and last == length - 1:
                        _draw_dashed(ax, line, (length, length + box.masked - 1))
                        end = max(end, length + box.masked)
                        dashed.add("masked lanes")
                for along in _skipped(mine, found.values()):
                    _draw_dashed(ax, line, along)
                    dashed.add("skipped by this program")
            room = end / 60  # room for the edge of the last box and for the tick label at the axis's end
            ax.set(xlim=(-0.5, end - 0.5 + room), ylim=(len(instances) - 0.4, -0.6))
            ax.set_title(f"{label(argument)}: {_times(accesses, argument, shape)}", fontsize=10)
            ax.set_xlabel("element" if flat else "row (token)", fontsize=9)
            ax.set_xticks(_ticks(end if flat else length))
            ax.tick_params(axis="x", labelsize=8.5)
            ax.set_yticks(range(len(instances)), [_named(program) for program in instances], fontsize=8.5)
            ax.tick_params(length=0)
            ax.grid(visible=False)
        panels[0].set_ylabel("program")
        title = (f'Kernel "{name}": the' if name else "The") + " reads and writes of each program"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11.5)
        _legend(figure, others=False, dashed=" / ".join(sorted(dashed)), numbered=numbered)
    return figure


def describe(accesses: Sequence[Access], shapes: Shapes, program: Program | None = None) -> str:
    """Return the picture of one program, or of all, in words."""
    chosen = programs(accesses) if program is None else [program]
    lines = []
    for instance in chosen:
        parts = []
        for kind, verb in VERBS.items():
            touched = [b for b in boxes(accesses, shapes, instance) if b.kind == kind]
            said = [
                _span(argument, [b for b in touched if b.argument == argument], shapes) for argument in shapes
            ]
            if any(said):
                parts.append(f"{verb} {', '.join(filter(None, said))}")
        lines.append(f"Program {_named(instance)} {'; '.join(parts) or 'touches nothing'}.")
    if program is None:
        lines += [f"{label(name)}: {_times(accesses, name, shape)}." for name, shape in shapes.items()]
    return " ".join(lines)


def pictures(accesses: Sequence[Access], shapes: Shapes) -> list[str]:
    """Return a picture of each program instance as HTML, with its words."""
    return [
        as_html(one_program(accesses, shapes, program), describe(accesses, shapes, program))
        for program in programs(accesses)
    ]


def play(accesses: Sequence[Access], shapes: Shapes, still: str = "") -> None:
    """Show the program instances in a player with a Play button and a slider.

    If they cannot be played, show `still`, or the programs in words.
    """
    instances = programs(accesses)
    words = still or "\n".join(describe(accesses, shapes, program) for program in instances)
    names = [_named(program) for program in instances]
    play_steps(lambda: pictures(accesses, shapes), "program", {"text/plain": words}, names)


def _draw_map(
    ax: Axes, argument: str, shape: tuple[int, int], touched: np.ndarray, mine: Sequence[Box]
) -> None:
    from matplotlib.colors import ListedColormap

    ax.imshow(
        touched > 0,
        cmap=ListedColormap([PAPER, RULE]),
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
    )
    for box in mine:
        (top, bottom), (left, right) = box.rows, box.columns
        panel.add_rectangle(
            ax, (left - 0.5, top - 0.5), right - left + 1, bottom - top + 1, **_look(box.kind), zorder=2
        )
        middle = ((left + right) / 2, (top + bottom) / 2)
        ax.text(*middle, str(box.turn), ha="center", va="center", fontsize=9, zorder=3, bbox=_PLATE)
    ax.set(xlim=(-0.5, shape[1] - 0.5), ylim=(shape[0] - 0.5, -0.5))
    ax.set_title(label(argument), fontsize=10.5)
    ax.set_xlabel(f"{shape[1]} wide", fontsize=9)
    ax.set_xticks([])
    ax.set_yticks(_ticks(shape[0]))
    ax.tick_params(length=0, labelsize=8.5)
    ax.grid(visible=False)
    ax.spines[:].set_visible(True)


def _draw_line(ax: Axes, box: Box, line: int, along: tuple[int, int], *, numbered: bool) -> None:
    first, last = along
    panel.add_rectangle(ax, (first - 0.5, line - 0.38), last - first + 1, 0.76, **_look(box.kind))
    if numbered:
        ax.text((first + last) / 2, line, str(box.turn), ha="center", va="center", fontsize=8.5, bbox=_PLATE)


def _skipped(mine: Sequence[Box], every: Iterable[Sequence[Box]]) -> list[tuple[int, int]]:
    """Return the rows of the tiles that only other programs read; none if no neighbouring programs share a tile."""
    read = [{b.rows for b in found if b.kind == "load"} for found in every]
    shared = len(read) > 1 and any(a & b for a, b in pairwise(read))
    return sorted(set().union(*read) - {b.rows for b in mine}) if shared else []


def _draw_dashed(ax: Axes, line: int, along: tuple[int, int]) -> None:
    first, last = along
    panel.add_rectangle(ax, (first - 0.5, line - 0.38), last - first + 1, 0.76, zorder=0.5, **_DASHED)


def _ticks(length: int) -> list[int]:
    """Return the ticks of an axis: every place of a short axis, the quarters of a long one.

    Most blocks begin and end at quarters.
    """
    return list(range(length)) if length <= 12 else [round(length * part / 4) for part in range(5)]


_DASHED: dict[str, Any] = {
    "facecolor": "none",
    "edgecolor": QUIET,
    "linewidth": 0.7,
    "linestyle": (0, (3, 3)),
    "alpha": 0.7,
}
_PLATE = {"boxstyle": "round,pad=0.12", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.75}


def _look(kind: str) -> dict[str, Any]:
    """Return fill and hatch for reads or writes, which also differ without colour."""
    looks: dict[str, dict[str, Any]] = {
        "load": {"facecolor": SKY},
        "store": {"facecolor": ORANGE, "hatch": "///"},
    }
    return {"edgecolor": INK, "linewidth": 0.8, **looks[kind]}


def _legend(figure: Figure, *, others: bool, dashed: str = "", numbered: bool = True) -> None:
    patches = [panel.patch(label="read", **_look("load")), panel.patch(label="written", **_look("store"))]
    if others:
        patches.append(panel.patch(label="touched by other programs only", facecolor=RULE, edgecolor=QUIET))
    if dashed:
        patches.append(panel.patch(label=dashed, **_DASHED))
    if numbered:
        order = "numbers: order of a program's accesses to this array"
        patches.append(panel.patch(label=order, facecolor="none", edgecolor="none"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=9)


def _named(program: Program) -> str:
    """Return a program's name: 2 for (2, 0, 0), and (2, 1) for (2, 1, 0)."""
    used = program[: 3 if program[2] else 2 if program[1] else 1]
    return str(used[0]) if len(used) == 1 else str(used).replace("'", "")


def _times(accesses: Sequence[Access], argument: str, shape: tuple[int, int]) -> str:
    """Return how often the elements of an argument are touched, such as "read 4×"."""
    said = []
    for kind, verb in (("load", "read"), ("store", "written")):
        times = counts(accesses, argument, kind, shape)
        if times.any():
            low, high = int(times.min()), int(times.max())
            said.append(f"{verb} {low if low == high else f'{low} to {high}'}×")
    return ", ".join(said) or "not touched"


def _span(argument: str, touched: Sequence[Box], shapes: Shapes) -> str:
    """Return the elements of one argument that a program touches, such as "K rows 0 to 63 in 4 turns"."""
    if not touched:
        return ""
    flat = shapes[argument][0] == 1
    spans = [b.columns if flat else b.rows for b in touched]
    what = "elements" if flat else "rows"
    turns = f" in {len(touched)} turns" if len(touched) > 1 else ""
    return f"{label(argument)} {what} {min(s[0] for s in spans)} to {max(s[1] for s in spans)}{turns}"
