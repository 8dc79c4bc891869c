"""The whole course as a ring: the lessons in the order of reading, with arrows from each to those that need it.

A second picture is about the first ring that the course runs, in which ranks pass on notes. It shows the
note that each rank has after each shift.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringlab.viz.frontend import import_widgets, is_live
from ringlab.viz.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    PURPLE,
    QUIET,
    RULE,
    as_html,
    new_figure,
    rank_colour,
    show,
    styled,
)
from ringlab_course.catalogue import CAPSTONE, COURSE, LESSONS, PARTS, Lesson, lesson
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PART_COLOURS = dict(zip(PARTS, (ORANGE, BLUE, GREEN, PURPLE, RULE), strict=True))
_DARK = {BLUE, GREEN}


def course_ring(selected: str = "05") -> None:
    """Display the ring of lessons around the lesson `selected`, with a slider in a live notebook."""
    if is_live():
        _show_player(selected)
    else:
        show(draw_course(selected), alt=describe_lesson(selected))


def draw_course(selected: str = "05") -> Figure:
    """Return a picture of `selected`, all lessons that it needs, and those that need it directly."""
    needed = all_needs(selected)
    with styled():
        figure = new_figure((8.4, 6.6))
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set(xlim=(-2.1, 2.1), ylim=(-1.85, 1.55), aspect="equal")
        title = f"The way to lesson {selected}, and the lessons that need it next"
        axes.text(-1.95, 1.5, title, va="center", fontsize=11.5, weight="bold", color=INK)
        for item in COURSE:
            for source in item.needs:
                is_path = item.id in (*needed, selected) and source in needed
                if is_path or source == selected:
                    _chord(axes, source, item.id, is_path=is_path)
        for item in COURSE:
            _node(axes, item, is_near=item.id in needed or item.id == selected, is_centre=item.id == selected)
        _legend(axes, selected)
    return figure


def describe_lesson(selected: str) -> str:
    """Return in words what the picture shows about one lesson."""
    item, needed = lesson(selected), all_needs(selected)
    before = f"needs {', '.join(needed)}" if needed else "needs no other lesson"
    return (
        f"Lesson {item.id}, {item.title}, {before}. It belongs to the part {item.part} and takes {item.minutes} minutes; "
        f"afterwards you can {item.afterwards}. The picture shows all {len(LESSONS)} lessons of the course and the capstone as a ring."
    )


def all_needs(lesson_id: str) -> tuple[str, ...]:
    """Return every lesson that must come before this one, directly or indirectly, in order."""
    found: set[str] = set()
    waiting = list(lesson(lesson_id).needs)
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += lesson(current).needs
    return tuple(sorted(found))


def _place(lesson_id: str, radius: float = 1.0) -> tuple[float, float]:
    angle = math.pi / 2 - 2 * math.pi * [item.id for item in COURSE].index(lesson_id) / len(COURSE)
    return radius * math.cos(angle), radius * math.sin(angle)


def _node(axes: Axes, item: Lesson, *, is_near: bool, is_centre: bool) -> None:
    x, y = _place(item.id)
    colour = PART_COLOURS[item.part]
    axes.scatter(
        [x], [y], s=640 if is_centre else 430, color=colour, zorder=3, marker="s" if item is CAPSTONE else "o",
        edgecolors=INK if is_near else colour, linewidths=2.6 if is_near else 1.4,
    )  # fmt: skip
    ink, weight = PAPER if colour in _DARK else INK, "bold" if is_near else "normal"
    axes.text(x, y, item.id, ha="center", va="center", fontsize=10, color=ink, weight="bold", zorder=4)
    tx, ty = _place(item.id, 1.17)
    side = "center" if abs(tx) < 0.1 else "left" if tx > 0 else "right"
    height = "bottom" if ty > 0.95 else "top" if ty < -1.05 else "center"
    axes.text(
        tx,
        ty - 0.05 * (height == "top"),
        _short(item.title),
        ha=side,
        va=height,
        fontsize=9.5,
        color=INK,
        weight=weight,
        zorder=4,
    )


def _short(title: str) -> str:
    """Return a title without its list or subtitle, in lines of at most 20 characters."""
    return textwrap.fill(title.partition(",")[0].partition(":")[0], 20)


def _chord(axes: Axes, source: str, target: str, *, is_path: bool) -> None:
    style = {
        "arrowstyle": "-|>", "color": INK if is_path else GREY, "linewidth": 1.8 if is_path else 1.2,
        "shrinkA": 13, "shrinkB": 13, "connectionstyle": "arc3,rad=0.25",
    }  # fmt: skip
    axes.annotate("", xy=_place(target), xytext=_place(source), arrowprops=style, zorder=2 if is_path else 1)


def _legend(axes: Axes, selected: str) -> None:
    for x, (part, colour) in zip((-1.9, -0.97, -0.24, 0.86, 1.42), PART_COLOURS.items(), strict=True):
        axes.scatter([x], [-1.5], s=70, color=colour, zorder=3)
        axes.text(x + 0.07, -1.5, part, va="center", fontsize=9.5, color=INK)
    axes.text(
        -1.95, -1.72,
        f"Read clockwise from the top; the square is the goal.\nDark arrows, bold names: what {selected} needs. Grey arrows: lessons that need {selected}.",
        va="center", fontsize=9.5, color=QUIET,
    )  # fmt: skip


def _show_player(selected: str) -> None:
    """Show a slider over the lessons, with the picture of the chosen lesson and its words."""
    ipywidgets = import_widgets()
    from IPython.display import display

    slider = ipywidgets.SelectionSlider(
        options=[item.id for item in LESSONS], value=selected, description="lesson", continuous_update=False,
        layout=ipywidgets.Layout(width="36em"),
    )  # fmt: skip

    def draw() -> str:
        return as_html(draw_course(slider.value), describe_lesson(slider.value), widest="760px")

    display(ipywidgets.VBox([slider, panel.moved_by(draw, slider)]))


CELL = (1.0, 0.66)
"""Width and height of a rank's cell; the next column begins 1.7 to the right, the next row 0.9 below."""


def note_grid(known: Sequence[Sequence[int]]) -> None:
    """Display the note that each rank holds after each shift: `known[rank][step]`, gathered on a ring."""
    show(draw_notes(known), alt=describe_notes(known))


def draw_notes(known: Sequence[Sequence[int]]) -> Figure:
    """Return a grid of ranks (down) and shifts (across), with the path of the last rank's note marked."""
    P, (width, height) = len(known), CELL
    with styled():
        figure = new_figure((8.4, 0.9 + 0.75 * P))
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set(xlim=(-1.25, 1.7 * P - 0.1), ylim=(0.9 * P + 0.3, -0.95))
        title = "The note that each rank holds, in the colour of the rank where it began"
        axes.text(-1.2, -0.8, title, va="center", fontsize=11.5, weight="bold", color=INK)
        for step in range(P):
            after = "at the start" if step == 0 else f"after {step} shift{'s' if step > 1 else ''}"
            axes.text(1.7 * step + width / 2, -0.25, after, ha="center", va="center", fontsize=10, color=INK)
        for rank, row in enumerate(known):
            axes.text(-0.35, 0.9 * rank + height / 2, f"rank {rank}", ha="right", va="center", color=INK)
            for step, note in enumerate(row):
                x, y, origin = 1.7 * step, 0.9 * rank, _origin(known, note)
                panel.add_rectangle(axes, (x, y), width, height, color=rank_colour(origin), zorder=3)
                axes.text(
                    x + width / 2, y + 0.24, str(note), ha="center", va="center", fontsize=12, weight="bold",
                    color=INK, zorder=4,
                )  # fmt: skip
                axes.text(
                    x + width / 2, y + 0.5, f"from rank {origin}", ha="center", va="center", fontsize=8.5,
                    color=INK, zorder=4,
                )  # fmt: skip
                if step + 1 < P:
                    _pass_on(axes, rank, step, P, is_followed=origin == P - 1)
        axes.text(
            -1.2, 0.9 * P + 0.12, f"Black arrows: the way of note {known[-1][0]}. The rank after rank {P - 1} is rank 0.",
            va="center", fontsize=9.5, color=QUIET,
        )  # fmt: skip
    return figure


def describe_notes(known: Sequence[Sequence[int]]) -> str:
    """Return in words the note that each rank holds after each shift, and the rank where it began."""
    lines = ["Grid of ranks and shifts: the note that each rank holds, and where it began."]
    for rank, row in enumerate(known):
        held = ", ".join(f"{note} from rank {_origin(known, note)}" for note in row)
        lines.append(f"Rank {rank}, at the start and after each shift: {held}.")
    return " ".join(lines)


def _origin(known: Sequence[Sequence[int]], note: int) -> int:
    """Return the rank that held `note` at the start."""
    return [row[0] for row in known].index(note)


def _pass_on(axes: Axes, rank: int, step: int, P: int, *, is_followed: bool) -> None:
    """Draw the arrow from a rank to the next one, in the gap between two columns."""
    middle = CELL[1] / 2
    style = {
        "arrowstyle": "-|>", "color": INK if is_followed else RULE, "linewidth": 2.0 if is_followed else 1.2,
        "shrinkA": 2, "shrinkB": 2,
    }  # fmt: skip
    begin = 1.7 * step + CELL[0], 0.9 * rank + middle
    end = 1.7 * (step + 1), 0.9 * ((rank + 1) % P) + middle
    axes.annotate("", xy=end, xytext=begin, arrowprops=style, zorder=2 if is_followed else 1)
