"""Two pictures of the kernels of a ring step: the bytes that a version moves, and one line of a launch table.

`segment` draws the line of the launch table that the caller passes, but computes the visible keys of each row
from the layout. So a mistake in the line can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringlab.layout import Layout
from ringlab_course.checking.accesses import record_accesses
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ringlab_course.checking.accesses import Access

_WIDEST = 0.29
"""The width of the largest arrow, as a share of the height of a step."""
Moved = list[tuple[int, int]]
"""For each launch, the bytes (read, written) of the partials, state and results of its rows."""


def moved(accesses: Iterable[Access]) -> Moved:
    """Return, for each launch, the bytes (read, written) of the partials, state and results of its rows.

    Q, K, V and launch tables are left out. OUT has two bytes per element, everything else four. A new launch
    begins where the program number returns to (0, 0, 0).
    """
    launches: list[dict[str, int]] = []
    before = False
    for access in accesses:
        first = access.program == (0, 0, 0)
        if first and not before:
            launches.append({"load": 0, "store": 0})
        before = first
        if access.argument not in ("Q", "K", "V", "PROGRAMS", "SEGMENTS"):
            launches[-1][access.kind] += len(access.offsets) * (2 if access.argument == "OUT" else 4)
    return [(each["load"], each["store"]) for each in launches]


def report(
    ladder: dict[str, Moved], name: str, right: NDArray[Any], steps: Callable[..., Any], *args: Any
) -> int:
    """Run all steps, print a summary, and record it in `ladder`; return the bytes moved for rows.

    right: the correct result in float64, which is compared with the tensor that `steps(*args)` returns.
    """
    with record_accesses() as accesses:
        out = steps(*args)
    launches = ladder[name] = moved(accesses)
    tiles = sum(access.argument == "K" for access in accesses)
    error = np.linalg.norm(out.double().numpy() - right) / np.linalg.norm(right)
    total = sum(map(sum, launches))
    print(
        f"{name:16} {len(launches)} launches, {tiles} tiles, {total / 1024:.0f} KiB for rows, error {error:.2%}"
    )
    return total


def segment(
    layout: Layout, rank: int, origin: int, rows: tuple[int, int], line: tuple[int, int, int, int]
) -> Figure:
    """Return a picture of one line of SEGMENTS, for the rows (start, stop) of one program.

    line: start, split, stop, shift. Each cell is one score.
    """
    from ringlab.viz.style import INK, ORANGE, PAPER, RULE, SKY, new_figure, styled

    start, split, stop, shift = line
    (row_start, row_stop), own, keys = rows, layout.positions(rank), layout.positions(origin)
    free: dict[str, Any] = {"facecolor": SKY, "edgecolor": PAPER}
    seen: dict[str, Any] = {"facecolor": ORANGE, "edgecolor": PAPER, "hatch": "//"}
    hidden: dict[str, Any] = {"facecolor": PAPER, "edgecolor": ORANGE, "hatch": ".."}
    outside: dict[str, Any] = {"facecolor": PAPER, "edgecolor": RULE, "hatch": "xx"}
    with styled():
        figure = new_figure((8.6, 4.2))
        title = (
            f"Rows {row_start} to {row_stop - 1}: start {start}, split {split}, stop {stop}, shift "
            + _signed(shift).replace(" ", "").removeprefix("+")
        )
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
        ax = figure.subplots()
        for row in range(row_start, row_stop):
            for key in range(len(keys)):
                masked = seen if keys[key] <= own[row] else hidden
                look = outside if not start <= key < stop else free if key < split else masked
                panel.add_rectangle(ax, (key, row), 1, 1, linewidth=0.8, **look)
            last = row + shift + 1
            ax.plot((last, last), (row, row + 1), color=INK, linewidth=2.4)
            if row + 1 < row_stop:
                ax.plot((last, last + 1), (row + 1, row + 1), color=INK, linewidth=2.4)
        for at, name in ((start, "start"), (split, "split"), (stop, "stop")):
            ax.plot((at, at), (row_start - 0.55, row_stop), color=INK, linewidth=1.0, linestyle=":")
            ax.text(at, row_start - 0.65, f"{name} {at}", ha="center", va="bottom", fontsize=9)
        ax.set(xlim=(-0.6, len(keys) + 0.6), ylim=(row_stop, row_start - 1.5), aspect="equal")
        ax.set_xticks(np.arange(len(keys)) + 0.5, [f"{key}\n{token}" for key, token in enumerate(keys)])
        ax.set_yticks(
            np.arange(row_start, row_stop) + 0.5,
            [f"{row}: token {own[row]}" for row in range(row_start, row_stop)],
        )
        ax.set_xlabel(f"key of rank {origin}, and below it its token", fontsize=9)
        ax.set_ylabel(f"row of rank {rank}", fontsize=9)
        panel.bare(ax, labelsize=8)
        words = {"full: no mask": free, "masked: seen": seen, "masked: hidden": hidden}
        handles: list[Any] = [
            panel.patch(label=label, **look) for label, look in {**words, "not read": outside}.items()
        ]
        (stairs,) = ax.plot(
            [], [], color=INK, linewidth=2.4, label=f"row i sees keys up to i {_signed(shift)}"
        )
        figure.legend(handles=[*handles, stairs], loc="outside lower center", ncols=5, fontsize=8.5)
    return figure


def describe_segment(
    layout: Layout, rank: int, origin: int, rows: tuple[int, int], line: tuple[int, int, int, int]
) -> str:
    """Return the picture of `segment` in words."""
    start, split, stop, shift = line
    words = [
        f"One line of SEGMENTS, {start}, {split}, {stop}, {shift}, for rows {rows[0]} to {rows[1] - 1} of rank {rank}, "
        f"which meet {layout.length(origin)} keys of rank {origin}. Keys {start} to {split - 1} need no mask. Under "
        f"the mask of keys {split} to {stop - 1}:"
    ]
    own, keys = layout.positions(rank), layout.positions(origin)
    for row in range(*rows):
        count = int((keys[split:stop] <= own[row]).sum())
        words.append(f"row {row}, token {own[row]}, sees {count} of {stop - split};")
    left = layout.length(origin) - (stop - start)
    return " ".join(words)[:-1] + f". Keys not read: {left}."


def _signed(shift: int) -> str:
    return f"− {-shift}" if shift < 0 else f"+ {shift}"


def traffic(versions: Mapping[str, Sequence[tuple[int, int]]], steps: int) -> Figure:
    """Return a column for each version of a ring step, with arrows for what each launch reads and writes.

    versions: by name, the bytes (read, written) of every launch in order, with the same number of launches in
    each step. If there are two launches per step, they are block and merge. An arrow's width is proportional
    to its bytes.
    """
    from ringlab.viz.style import ORANGE, SKY, new_figure, styled

    with styled():
        figure = new_figure((1.85 * len(versions) + 0.6, 5.4))
        title = "State and results that each step reads and writes, in KiB"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
        columns = figure.subplots(1, len(versions), squeeze=False, sharey=True)[0]
        most = max(count for launches in versions.values() for launch in launches for count in launch)
        for ax, (name, launches) in zip(columns, versions.items(), strict=True):
            _draw_column(ax, launches, steps, most)
            ax.set_title(f"{name}\n{_kib(sum(map(sum, launches)))} KiB in all", fontsize=9.5)
        columns[0].set_yticks([step + 0.5 for step in range(steps)], [f"step {n}" for n in range(steps)])
        handles = [
            panel.patch(color=SKY, label="the kernel reads"),
            panel.patch(color=ORANGE, label="the kernel writes"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8.5)
    return figure


def describe_traffic(versions: Mapping[str, Sequence[tuple[int, int]]], steps: int) -> str:
    """Return the picture of `traffic` in words."""
    words = [
        "State and results of its rows that each step of the ring reads from memory and writes to it, in KiB."
    ]
    for name, launches in versions.items():
        each = len(launches) // steps
        parts = (
            f"step {step} reads {_kib(sum(read for read, _ in own))} and writes {_kib(sum(put for _, put in own))}"
            for step in range(steps)
            for own in [launches[step * each : (step + 1) * each]]
        )
        words.append(f"{name}, {_kib(sum(map(sum, launches)))} in all: {'; '.join(parts)}.")
    return " ".join(words)


def _draw_column(ax: Axes, launches: Sequence[tuple[int, int]], steps: int, most: int) -> None:
    """Draw the launches of one version from top to bottom, as arrows between kernels and memory.

    most: the bytes of the widest arrow.
    """
    from ringlab.viz.style import INK, PAPER, RULE

    each = len(launches) // steps
    kernels = ("block", "merge") if each == 2 else ("kernel",) * each
    panel.add_rectangle(ax, (0.84, 0.04), 0.16, steps - 0.08, facecolor=RULE, edgecolor="none")
    ax.text(0.92, steps / 2, "memory", rotation=90, ha="center", va="center", fontsize=9)
    for step in range(steps):
        own, top = launches[step * each : (step + 1) * each], step + 0.04
        arrows = sum(count > 0 for moved in own for count in moved)
        for kernel, moved in zip(kernels, own, strict=True):
            height = 0.92 * sum(count > 0 for count in moved) / arrows
            look: dict[str, Any] = {"facecolor": PAPER, "edgecolor": INK, "linewidth": 1.0}
            panel.add_rectangle(ax, (0.0, top + 0.02), 0.3, height - 0.04, **look)
            ax.text(0.15, top + height / 2, kernel, ha="center", va="center", fontsize=8)
            _arrows(ax, moved, top, height, _WIDEST / most)
            top += height
    ax.set(xlim=(-0.01, 1), ylim=(steps, 0), xticks=[])
    panel.bare(ax, labelsize=9)


def _arrows(ax: Axes, moved: tuple[int, int], top: float, height: float, per_byte: float) -> None:
    """Draw the reads and writes of a launch, one below the other; `per_byte` is the width for one byte."""
    from matplotlib.patches import FancyArrow

    from ringlab.viz.style import ORANGE, SKY

    looks = (SKY, 0.83, 0.31), (ORANGE, 0.31, 0.83)
    shown = [(count, *look) for count, look in zip(moved, looks, strict=True) if count]
    gap = (height - sum(moved) * per_byte) / (1 + len(shown))
    for count, colour, begin, end in shown:
        width = count * per_byte
        middle, top = top + gap + width / 2, top + gap + width
        shape: dict[str, Any] = {"width": width, "head_width": width + 0.06, "head_length": 0.1}
        look: dict[str, Any] = {"length_includes_head": True, "color": colour, "linewidth": 0}
        ax.add_patch(FancyArrow(begin, middle, end - begin, 0, **shape, **look))
        room = width > 0.1  # otherwise the number is above the arrow
        at = middle if room else middle - width / 2 - 0.01
        ax.text(0.57, at, _kib(count), ha="center", va="center" if room else "bottom", fontsize=8)


def _kib(count: int) -> str:
    """Return a number of bytes in KiB, as text."""
    return f"{count / 1024:,.0f}"
