"""Two programs side by side: lines with the same job have the same colour and are connected by a ribbon.

The source texts are read from the programs that ran. Each job also has a number, so that the picture can be
read without colours; a legend below names the jobs. A second figure has two panels, each with one of two ways
in which a gradient can travel around the same ring.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ringlab.errors import CourseError
from ringlab.viz.style import INK, PAPER, QUIET, RULE, new_figure, rank_colour, styled
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE = 0.26
"""Height of a line in inches."""
CHARACTER = 0.083
"""Width of one character in inches, at 9.5 points of DejaVu Sans Mono."""
GAP = 6
"""Width of the gap between the columns, in characters, for the ribbons."""
KEY_COLUMNS = 2
"""Columns of the legend, one below each program."""


@dataclass(frozen=True)
class Job:
    """A job that both programs do; `left` and `right` are pieces of the lines that do it."""

    name: str
    left: tuple[str, ...]
    right: tuple[str, ...]


def lines_of(source: str, pieces: Sequence[str]) -> list[int]:
    """Return the numbers, from 0, of the first line that contains each piece.

    Raises: CourseError if no line contains a piece, because then the picture no longer fits the program.
    """
    lines, found = source.splitlines(), []
    for piece in pieces:
        numbers = [number for number, line in enumerate(lines) if piece in line]
        if not numbers:
            raise CourseError(f"a line with {piece!r}", f"a program of {len(lines)} lines without it")
        found.append(numbers[0])
    return found


def figure(titles: tuple[str, str], sources: tuple[str, str], jobs: Sequence[Job], title: str = "") -> Figure:
    """Return a picture of both sources in two columns. Job n has the number n + 1 and the colour of rank n.

    Raises: CourseError for a job that is not found in a source.
    """
    texts = [_plain(source) for source in sources]
    widths = [max(map(len, text.splitlines())) + 3 for text in texts]
    height = max(text.count("\n") + 1 for text in texts)
    key_rows, top = -(-len(jobs) // KEY_COLUMNS), 2.9 if title else 1.5
    bottom = height + 0.8 + key_rows
    with styled():
        drawn = new_figure(((sum(widths) + GAP) * CHARACTER + 0.2, (bottom + top) * LINE))
        ax = drawn.subplots()
        ax.set(xlim=(0, sum(widths) + GAP), ylim=(bottom, -top))
        ax.axis("off")
        ax.text(0, -top + 0.7, title, fontsize=11.5, fontweight="bold", va="center")
        starts = (0, widths[0] + GAP)
        for number, job in enumerate(jobs):
            _draw_job(ax, number, job, texts, starts, widths)
        for title, text, start in zip(titles, texts, starts, strict=True):
            ax.text(start, -0.75, title, fontweight="bold", va="center")
            for row, line in enumerate(text.splitlines()):
                _write(ax, start + 2, row + 0.5, line)
        for number, job in enumerate(jobs):
            column, row = divmod(number, key_rows)
            _draw_key(ax, number, job, starts[column], height + 0.6 + row)
    return drawn


def describe(titles: tuple[str, str], sources: tuple[str, str], jobs: Sequence[Job]) -> str:
    """Return the alternative text of `figure`, which says which lines do the same job."""
    texts = [_plain(source).splitlines() for source in sources]
    said = []
    for number, job in enumerate(jobs, 1):
        pairs = zip(titles, texts, (job.left, job.right), strict=True)
        sides = [
            f"{title}: {'; '.join(lines[n].strip() for n in lines_of(chr(10).join(lines), pieces)) or 'nothing'}"
            for title, lines, pieces in pairs
        ]
        said.append(f"{number}, {job.name}. {'. '.join(sides)}.")
    return f"Two programs side by side, {titles[0]} and {titles[1]}. " + " ".join(said)


def _plain(source: str) -> str:
    """Return the source without empty lines and one-line docstrings, which belong to no job."""
    lines = textwrap.dedent(source).strip("\n").splitlines()
    return "\n".join(line for line in lines if line.strip() and not line.strip().startswith('"""'))


def _write(ax: Axes, x: float, y: float, line: str) -> None:
    ax.text(
        x, y, line, family="DejaVu Sans Mono", fontsize=9.5, va="center",
        color=QUIET if line.lstrip().startswith("#") else INK,
    )  # fmt: skip


def _draw_key(ax: Axes, number: int, job: Job, x: float, y: float) -> None:
    """Draw a legend key: a band like those of the job's lines, with the job's number and name."""
    panel.add_rectangle(ax, (x, y + 0.1), 1.8, 0.8, color=rank_colour(number), alpha=0.3, linewidth=0)
    ax.text(x + 0.9, y + 0.5, str(number + 1), fontsize=8, va="center", ha="center", color=INK)
    ax.text(x + 2.6, y + 0.5, job.name, fontsize=9.5, va="center", color=INK)


def _draw_job(
    ax: Axes, number: int, job: Job, texts: list[str], starts: tuple[int, int], widths: list[int]
) -> None:
    """Draw bands behind a job's lines, its number beside them, and ribbons from left lines to right lines."""
    from matplotlib.patches import Polygon

    colour = rank_colour(number)
    rows = [lines_of(text, pieces) for text, pieces in zip(texts, (job.left, job.right), strict=True)]
    for side, start, width in zip(rows, starts, widths, strict=True):
        for row in side:
            panel.add_rectangle(ax, (start, row + 0.06), width, 0.88, color=colour, alpha=0.3, linewidth=0)
            ax.text(start + 0.9, row + 0.5, str(number + 1), fontsize=8, va="center", ha="center", color=INK)
    from_x, to_x = starts[0] + widths[0], starts[1]
    for a in rows[0]:
        for b in rows[1]:
            corners = [(from_x, a + 0.06), (to_x, b + 0.06), (to_x, b + 0.94), (from_x, a + 0.94)]
            ax.add_patch(Polygon(corners, closed=True, color=colour, alpha=0.16, linewidth=0))


BOX_WIDTH, BOX_HEIGHT = 0.66, 0.34
"""Width and half of the height of a box in `two_ways`, where columns and rows are 1 apart."""
Stop = tuple[int, tuple[int, ...]]
"""A device, and the devices whose terms are in the sum for block 0 when it leaves this device."""


def ways_home(P: int) -> dict[str, list[Stop]]:
    """Return the stops of the sum for block 0 in the backward, with autodiff and with couriers."""
    back = [(rank, tuple(range(rank, P))) for rank in reversed(range(P))]
    around = [(rank, tuple(range(rank + 1))) for rank in range(P)]
    return {
        "Autodiff: every device kept block 0, and its gradient goes back": back,
        "Couriers: block 0 comes around again, and its gradient travels with it": [
            *around,
            (0, tuple(range(P))),
        ],
    }


def two_ways(P: int) -> Figure:
    """Return the forward path of block 0 and the path of its gradient, in a panel for each of two ways."""
    with styled():
        drawn = new_figure((8.6, 2 * (0.52 * P + 0.75) + 0.7))
        panels = drawn.subplots(2, 1)
        for ax, (title, stops) in zip(panels, ways_home(P).items(), strict=True):
            _draw_way(ax, P, stops, kept=len(stops) == P)
            ax.set_title(title)
        keys = [
            panel.patch(
                facecolor=RULE, edgecolor=INK, label="block 0 of K and V, kept here until the backward"
            )
        ]
        keys += [
            panel.patch(
                facecolor=PAPER, edgecolor=QUIET, linestyle="--", label="block 0 of K and V, not kept"
            )
        ]
        keys += [
            panel.patch(
                facecolor=rank_colour(rank), label=f"dK and dV of block 0: device {rank} has added its term"
            )
            for rank in range(P)
        ]
        drawn.legend(handles=keys, loc="outside lower center", ncols=2, fontsize=8)
    return drawn


def _draw_way(ax: Axes, P: int, stops: Sequence[Stop], kept: bool) -> None:
    """Draw the forward on the left, hop by hop, and the backward on the right."""
    for rank in range(P):
        held = kept or rank == 0
        look: dict[str, Any] = (
            {"facecolor": RULE, "edgecolor": INK}
            if held
            else {"facecolor": PAPER, "edgecolor": QUIET, "linestyle": "--"}
        )
        panel.add_rectangle(ax, (rank - BOX_WIDTH / 2, rank - BOX_HEIGHT), BOX_WIDTH, 2 * BOX_HEIGHT, **look)
        ax.text(rank, rank, "kept" if held else "passes", ha="center", va="center", fontsize=8)
    first = P + 0.5
    for number, (rank, terms) in enumerate(stops):
        left, width = first + number - BOX_WIDTH / 2, BOX_WIDTH / P
        for term in range(P):
            fill = rank_colour(term) if term in terms else PAPER
            corner = left + term * width, rank - BOX_HEIGHT
            panel.add_rectangle(
                ax, corner, width, 2 * BOX_HEIGHT, facecolor=fill, edgecolor=INK, linewidth=0.8
            )
    forward = [(number, number) for number in range(P)]
    backward = [(first + number, rank) for number, (rank, _) in enumerate(stops)]
    for way in (forward, backward):
        for (x, y), (to_x, to_y) in pairwise(way):
            start, end = (x + BOX_WIDTH / 2, y), (to_x - BOX_WIDTH / 2, to_y)
            arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2}
            ax.annotate("", xy=end, xytext=start, arrowprops=arrow)
    ax.axvline(P - 0.25, color=QUIET, linewidth=1)
    names = [f"forward\nstep {step}" for step in range(P)] + [f"backward\nstep {n}" for n in range(P)]
    places = [*range(P), *(first + n for n in range(P))]
    if len(stops) > P:
        names, places = [*names, "at home"], [*places, first + P]
    ax.set_xticks(places, names, fontsize=8)
    ax.set_yticks(range(P), [f"device {rank}" for rank in range(P)], fontsize=9)
    ax.set(xlim=(-0.6, first + P + 0.5), ylim=(P - 0.5, -0.5))
    panel.bare(ax)


def describe_two_ways(P: int) -> str:
    """Return both ways in words: the alternative text of `two_ways`."""
    lines = [
        "The gradient of block 0 comes home in two ways: back over kept copies, or once more around with the block."
    ]
    for title, stops in ways_home(P).items():
        steps = [f"on device {rank} it holds terms of {', '.join(map(str, terms))}" for rank, terms in stops]
        lines.append(f"{title}. Forward: block 0 visits devices 0 to {P - 1}. Backward: {'; '.join(steps)}.")
    return " ".join(lines)
