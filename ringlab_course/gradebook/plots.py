"""The pictures of the class page, each with alternative text.

A page's security policy allows only the page's own style sheet, by its hash. So matplotlib's `style="…"` is
replaced by attributes, and its style element is removed, as are metadata and namespaces. Colours follow light
and dark mode.
"""

from __future__ import annotations

import io
import itertools
import re
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup

from ringlab.viz.style import BLUE, GREY, INK, ORANGE, PAPER, QUIET, RED, RULE, new_figure, styled
from ringlab_course.gradebook.readable import duration, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_THEMED = {
    INK: "var(--ink)",
    QUIET: "var(--quiet)",
    RULE: "var(--rule)",
    PAPER: "var(--paper)",
    BLUE: "var(--good)",
    RED: "var(--bad)",
    GREY: "var(--none)",
    ORANGE: "var(--warn)",
}
_COLOURS = {colour.lower(): themed for colour, themed in _THEMED.items()}


def inline_svg(figure: Figure, alt: str, prefix: str) -> Markup:
    """Return the figure as an SVG element with the alternative text `alt`.

    prefix: begins the ids in this figure, so that they differ from those of other figures.
    Raises: ValueError if `alt` is empty.
    """
    import matplotlib

    if not alt.strip():
        raise ValueError("alt: say in words what the figure shows")
    buffer = io.BytesIO()
    with styled(), matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(buffer.getvalue())
    names = _new_ids(root, prefix)
    for element in root.iter():
        _made_plain(element, names)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in ("metadata", "style"):
                parent.remove(child)
    width, height = root.attrib["viewBox"].split()[2:]
    root.attrib.clear()
    root.attrib.update(
        {"class": "figure", "role": "img", "aria-label": alt, "viewBox": f"0 0 {width} {height}"}
    )
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _new_ids(root: ElementTree.Element, prefix: str) -> dict[str, str]:
    """Return a new id for every id that is referred to."""
    text = ElementTree.tostring(root, encoding="unicode")
    used = dict.fromkeys(re.findall(r'(?:href="|url\()#(\w+)', text))
    return {old: f"{prefix}-{number}" for number, old in zip(itertools.count(1), used, strict=False)}


def _made_plain(element: ElementTree.Element, names: dict[str, str]) -> None:
    element.tag = element.tag.rpartition("}")[2]
    given = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    for declaration in filter(None, given.pop("style", "").split(";")):
        key, _, value = declaration.partition(":")
        if key.strip() != "font-family":
            given[key.strip()] = _COLOURS.get(value.strip(), value.strip())
    if given.get("fill") in _COLOURS:
        given["fill"] = _COLOURS[given["fill"]]
    if (old := given.pop("id", None)) in names:
        given["id"] = names[old]
    element.attrib.clear()
    for key, value in given.items():
        renamed = re.sub(r"#(\w+)", lambda found: f"#{names.get(found[1], found[1])}", value)
        element.attrib[key] = (
            re.sub(r"(\d+\.\d\d)\d+", r"\1", renamed) if "." in renamed else value and renamed
        )
    element.tail = None if element.tail is None or not element.tail.strip() else element.tail
    element.text = None if element.text is None or not element.text.strip() else element.text


WIDTH = 5.0
"""Width of every figure in inches, so that its letters can be read on a phone."""
BINS = 10
FAILS, HOLDS, NOT_WRITTEN = "fails", "holds", "not written"


def in_bins(percents: Sequence[float]) -> list[int]:
    """Return how many scores are in [0, 10), [10, 20), …, [90, 100]. A score above 100 counts as 100."""
    counts = [0] * BINS
    for percent in percents:
        counts[min(BINS - 1, max(0, int(percent * BINS // 100)))] += 1
    return counts


def distribution(percents: Sequence[float], prefix: str) -> Markup:
    """Return a histogram of scores in percent of the maximum, with their median."""
    counts, middle = in_bins(percents), statistics.median(percents)
    said = [
        f"{count} between {10 * number} and {10 * number + 10} %"
        for number, count in enumerate(counts)
        if count
    ]
    alt = f"How {len(percents)} scores are spread, in percent of the maximum: {', '.join(said)}. Median {middle:.0f} %."
    with styled():
        figure = new_figure((WIDTH, 2.3))
        axes = figure.subplots()
        axes.bar([10 * n + 5 for n in range(BINS)], counts, width=9, color=BLUE)
        axes.axvline(middle, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        side, shift = ("right", -4) if middle > 50 else ("left", 4)
        axes.annotate(
            f"median {middle:.0f} %", (middle, max(counts) * 1.12), (shift, 0),
            textcoords="offset points", ha=side, va="center", color=INK,
        )  # fmt: skip
        axes.set(xlim=(0, 100), ylim=(0, max(counts) * 1.25), xlabel="score, % of the maximum")
        axes.set(ylabel="learners", xticks=range(0, 101, 10))
        _whole_numbers(axes)
        axes.grid(axis="x", visible=False)
    return inline_svg(figure, alt, prefix)


def times(parts: Sequence[tuple[str, Sequence[float]]], prefix: str) -> Markup:
    """Return a plot of grading times: a row per part, a dot per submission, a line at each median."""
    medians = [statistics.median(seconds) for _, seconds in parts]
    said = [f"{label} {duration(middle)}" for (label, _), middle in zip(parts, medians, strict=True)]
    most, slowest = max((max(seconds), label) for label, seconds in parts)
    alt = f"Seconds of grading, median of a submission: {', '.join(said)}. The longest single part: {slowest}, {duration(most)}."
    with styled():
        figure = new_figure((WIDTH, 0.85 + 0.34 * len(parts)))
        axes = figure.subplots()
        for row, (_, seconds) in enumerate(parts):
            spread = [row + ((index * 0.618) % 1 - 0.5) * 0.5 for index in range(len(seconds))]
            axes.plot([max(s, 0.01) for s in seconds], spread, "o", color=BLUE, markersize=3, alpha=0.6)
            axes.plot([max(medians[row], 0.01)] * 2, [row - 0.38, row + 0.38], color=INK, linewidth=2)
        axes.set_xscale("log")
        axes.set_yticks(range(len(parts)), [short(label, 24) for label, _ in parts], parse_math=False)
        axes.set(ylim=(len(parts) - 0.5, -0.5), xlabel="seconds, logarithmic; the line is the median")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter("")
        axes.grid(axis="y", visible=False)
    return inline_svg(figure, alt, prefix)


def matrix(columns: Sequence[str], rows: Sequence[Sequence[str]], prefix: str) -> Markup:
    """Return a picture of which checks fail together: a column per check, a row per submission, best on top.

    Each cell is FAILS, NOT_WRITTEN or HOLDS.
    """
    failing = [sum(row[column] != HOLDS for row in rows) for column in range(len(columns))]
    worst = max(range(len(columns)), key=failing.__getitem__)
    together = sum(all(cell != HOLDS for cell in row) for row in rows)
    alt = (
        f"Checks that fail together: {len(rows)} submissions, from the best to the worst, by {len(columns)} checks. "
        f"{columns[worst]} fails most, in {failing[worst]}; in {together} submissions nothing holds. The table of "
        "checks has the counts."
    )
    with styled():
        figure = new_figure((WIDTH, 1.35 + min(4.0, max(0.8, 0.09 * len(rows)))))
        axes = figure.subplots()
        for state, colour, hatch in ((FAILS, RED, None), (NOT_WRITTEN, GREY, "////")):
            _cells(axes, rows, state, colour, hatch)
        axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
        # The label has two short lines, because the axis is short if the class is small.
        axes.set_ylabel("submissions,\nbest on top", fontsize=8.5)
        ticks = [column + 0.5 for column in range(len(columns))]
        axes.set_xticks(ticks, [short(c, 24) for c in columns], rotation=90, fontsize=7.5, parse_math=False)
        axes.set_yticks([])
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False)
        for column in range(1, len(columns)):
            axes.axvline(column, color=PAPER, linewidth=1.0)
        axes.spines[["left", "bottom"]].set_color(QUIET)
        if axes.patches:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handlelength=1.2)
    return inline_svg(figure, alt, prefix)


def _cells(axes: Axes, rows: Sequence[Sequence[str]], state: str, colour: str, hatch: str | None) -> None:
    """Draw all cells of one state as a single path, so that the file of a large class stays small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    vertices: list[tuple[float, float]] = []
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            if cell == state:
                vertices += [(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1), (x, y)]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * (len(vertices) // 5)
    if vertices:
        style: dict[str, Any] = {"facecolor": colour, "edgecolor": QUIET, "linewidth": 0, "hatch": hatch}
        axes.add_patch(PathPatch(Path(vertices, codes), label=state, **style))


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
