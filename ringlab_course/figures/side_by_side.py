"""Two programs side by side: lines that do the same job share a colour and a ribbon between the columns.

The sources are those that ran. Colours are doubled by the job's number, so that none is needed to read it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringlab.errors import CourseError
from ringlab.viz.style import INK, QUIET, new_figure, rank_colour, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE = 0.26
"""Height of a line in inches."""
CHARACTER = 0.083
"""Width of one character in inches, at 9.5 points of DejaVu Sans Mono."""
GAP = 6
"""Characters between the columns, for the ribbons."""


@dataclass(frozen=True)
class Job:
    """One thing that both programs do; `left` and `right` are pieces of the lines that do it."""

    name: str
    left: tuple[str, ...]
    right: tuple[str, ...]


def lines_of(source: str, pieces: Sequence[str]) -> list[int]:
    """Return the numbers, from 0, of the first line that holds each piece.

    Raises: CourseError for a piece that no line holds: picture and program have drifted apart.
    """
    lines, found = source.splitlines(), []
    for piece in pieces:
        numbers = [number for number, line in enumerate(lines) if piece in line]
        if not numbers:
            raise CourseError(f"a line with {piece!r}", f"a program of {len(lines)} lines without it")
        found.append(numbers[0])
    return found


def figure(titles: tuple[str, str], sources: tuple[str, str], jobs: Sequence[Job]) -> Figure:
    """Return both sources as text in two columns; job n has the number n + 1 and the colour of rank n.

    Raises: CourseError for a job that is not found in a source.
    """
    texts = [_plain(source) for source in sources]
    widths = [max(map(len, text.splitlines())) + 3 for text in texts]
    height = max(text.count("\n") + 1 for text in texts)
    with styled():
        drawn = new_figure(((sum(widths) + GAP) * CHARACTER + 0.2, (height + 1.8) * LINE))
        ax = drawn.subplots()
        ax.set(xlim=(0, sum(widths) + GAP), ylim=(height + 0.3, -1.5))
        ax.axis("off")
        starts = (0, widths[0] + GAP)
        for number, job in enumerate(jobs):
            _draw_job(ax, number, job, texts, starts, widths)
        for title, text, start in zip(titles, texts, starts, strict=True):
            ax.text(start, -0.75, title, fontweight="bold", va="center")
            for row, line in enumerate(text.splitlines()):
                _write(ax, start + 2, row + 0.5, line)
    return drawn


def describe(titles: tuple[str, str], sources: tuple[str, str], jobs: Sequence[Job]) -> str:
    """Return in words which lines do the same job: the alternative text of `figure`."""
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
    """Without docstrings of one line and empty lines, which are nobody's job."""
    lines = textwrap.dedent(source).strip("\n").splitlines()
    return "\n".join(line for line in lines if line.strip() and not line.strip().startswith('"""'))


def _write(ax: Axes, x: float, y: float, line: str) -> None:
    ax.text(
        x, y, line, family="DejaVu Sans Mono", fontsize=9.5, va="center",
        color=QUIET if line.lstrip().startswith("#") else INK,
    )  # fmt: skip


def _draw_job(
    ax: Axes, number: int, job: Job, texts: list[str], starts: tuple[int, int], widths: list[int]
) -> None:
    """Bands behind the lines of a job, its number beside them, ribbons from each left line to each right one."""
    from matplotlib.patches import Polygon, Rectangle

    colour = rank_colour(number)
    rows = [lines_of(text, pieces) for text, pieces in zip(texts, (job.left, job.right), strict=True)]
    for side, start, width in zip(rows, starts, widths, strict=True):
        for row in side:
            ax.add_patch(Rectangle((start, row + 0.06), width, 0.88, color=colour, alpha=0.3, linewidth=0))
            ax.text(start + 0.9, row + 0.5, str(number + 1), fontsize=8, va="center", ha="center", color=INK)
    from_x, to_x = starts[0] + widths[0], starts[1]
    for a in rows[0]:
        for b in rows[1]:
            corners = [(from_x, a + 0.06), (to_x, b + 0.06), (to_x, b + 0.94), (from_x, a + 0.94)]
            ax.add_patch(Polygon(corners, closed=True, color=colour, alpha=0.16, linewidth=0))
