"""The kill matrix: which check (a column) finds which fault (a row), with the evidence for each cell.

Each cell has a sign and a colour: ● the check found the fault, · the check passed, – it does not apply.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringlab.viz.frontend import import_widgets, show_player
from ringlab.viz.style import BLUE, INK, ORANGE, PAPER, QUIET, RULE, new_figure, styled
from ringlab_course.clinic.suite import KillMatrix
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOUND, HELD, NONE = "●", "·", "–"
WORDS = {True: "finds it", False: "holds", None: "does not apply"}
SIGNS = {True: FOUND, False: HELD, None: NONE}
GROUPS = {
    "one result, no mask": ("forward", "lse", "dq", "dk", "dv"),
    "masks and lengths": ("masks", "causality", "blind rows", "ragged"),
    "lost digits": ("large logits", "sloped logits", "error growth"),
    "traffic": ("rounds", "bytes"),
}
"""The clinic's checks by what they look at, in the order of the columns."""


def figure(
    matrix: KillMatrix,
    names: Mapping[str, str] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> Figure:
    """Return the matrix as a static figure; `names` gives rows other names than the patients'.

    groups: names of groups of neighbouring checks, which stand below the columns.
    """
    from matplotlib.lines import Line2D

    rows, columns = matrix.patients, matrix.checks
    with styled():
        drawn = new_figure((0.46 * len(columns) + 2.6, 0.34 * len(rows) + 1.9))
        ax = drawn.subplots()
        for down, name in enumerate(rows):
            for across, check in enumerate(columns):
                found = matrix.finds(name, check)
                if found:
                    corner = across - 0.46, down - 0.44
                    panel.add_rectangle(ax, corner, 0.92, 0.88, facecolor=BLUE, edgecolor=PAPER)
                colour = PAPER if found else QUIET
                ax.text(across, down, SIGNS[found], ha="center", va="center", color=colour, fontsize=10)
        ax.set_xticks(range(len(columns)), columns, rotation=55, ha="left", rotation_mode="anchor")
        ax.set_yticks(range(len(rows)), [(names or {}).get(name, name) for name in rows])
        ax.xaxis.tick_top()
        ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - (0.5 if groups is None else -0.4), -0.5))
        panel.bare(ax, labelcolor=INK)
        for group, checks in (groups or {}).items():
            first, last = columns.index(checks[0]), columns.index(checks[-1])
            below = len(rows) - 0.4
            ax.plot([first - 0.42, last + 0.42], [below, below], color=INK, linewidth=1.4)
            ax.text((first + last) / 2, below + 0.15, group, ha="center", va="top", fontsize=9)
        looks = {True: ("s", BLUE), False: (".", QUIET), None: ("_", QUIET)}
        keys = [
            Line2D([], [], linestyle="", marker=marker, color=colour, label=WORDS[found])
            for found, (marker, colour) in looks.items()
        ]
        drawn.legend(handles=keys, loc="outside lower center", ncols=3)
        drawn.suptitle("Which check (columns) finds which fault (rows)", fontsize=11)
    return drawn


def describe(matrix: KillMatrix) -> str:
    """Return the matrix in words, patient by patient."""
    lines = []
    for name in matrix.patients:
        found = matrix.found_by(name)
        text = f"found by {', '.join(found)}" if found else "found by none"
        lines.append(f"{name}: {text}.")
    return " ".join(lines)


def evidence(matrix: KillMatrix, name: str, check: str) -> str:
    """Return one cell in words: what the check tests, and what it observed."""
    finding, found = matrix.findings[name][check], matrix.finds(name, check)
    return f"{name} × {check}: the check {WORDS[found]}. It asks: {finding.asks}. Seen: {' '.join(finding.evidence.split())[:400]}"


def table(matrix: KillMatrix, row: int, column: int) -> str:
    """Return the matrix as an HTML table with one cell marked, and that cell's evidence below it."""
    head = "".join(_head(check, at == column) for at, check in enumerate(matrix.checks))
    body = []
    for down, name in enumerate(matrix.patients):
        cells = "".join(
            _cell(matrix.finds(name, check), down == row, across == column)
            for across, check in enumerate(matrix.checks)
        )
        weight = "bold" if down == row else "normal"
        body.append(f'<tr><th scope="row" style="text-align:left;font-weight:{weight}">{name}</th>{cells}</tr>')  # fmt: skip
    text = html.escape(evidence(matrix, matrix.patients[row], matrix.checks[column]))
    style = f"border-collapse:collapse;color:{INK};background:{PAPER}"
    return (
        f'<table style="{style}"><thead><tr><td></td>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
        f'<p aria-live="polite" style="max-width:56em">{text}</p>'
    )


def _head(check: str, picked: bool) -> str:
    weight = "bold" if picked else "normal"
    style = f"writing-mode:vertical-rl;transform:rotate(180deg);text-align:left;font-weight:{weight};padding:4px 2px"  # fmt: skip
    return f'<th scope="col" style="{style}">{html.escape(check)}</th>'


def _cell(found: bool | None, in_row: bool, in_column: bool) -> str:
    fill, colour = (BLUE, PAPER) if found else (RULE if in_row or in_column else PAPER, INK)
    edge = f"3px solid {ORANGE}" if in_row and in_column else f"1px solid {RULE}"
    style = f"width:1.9em;height:1.7em;text-align:center;background:{fill};color:{colour};border:{edge}"
    return f'<td style="{style}" title="{WORDS[found]}">{SIGNS[found]}</td>'


def player(matrix: KillMatrix) -> Any:
    """Return a widget with sliders for a patient and a check, which shows the evidence of their cell.

    The arrow keys move the sliders.
    """
    ipywidgets = import_widgets()

    wide = ipywidgets.Layout(width="30em")
    patient = ipywidgets.SelectionSlider(
        options=_numbered(matrix.patients), description="patient", layout=wide
    )
    check = ipywidgets.SelectionSlider(options=_numbered(matrix.checks), description="check", layout=wide)
    picture = panel.moved_by(lambda: table(matrix, patient.value, check.value), patient, check)
    return ipywidgets.VBox([patient, check, picture])


def play(matrix: KillMatrix) -> None:
    """Show the player if a person can use it; otherwise print that `figure` shows the matrix below."""
    still = "run this cell to move through the matrix with the arrow keys; the whole of it is below"
    show_player(lambda: player(matrix), lambda: print(still))


def _numbered(names: Sequence[str]) -> list[tuple[str, int]]:
    return [(name, number) for number, name in enumerate(names)]
