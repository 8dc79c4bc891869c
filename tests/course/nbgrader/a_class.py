"""The submissions of a class: released notebooks, filled in rightly, wrongly, with malice or with missing cells."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.course.submissions_of import submission

CHECKOUT = Path(__file__).resolve().parents[3]
SLUG = "02_online_softmax"
MARKER = "run-by-nbgrader.txt"
"""The file that hostile code leaves in the course folder if nbgrader runs it outside of the sandbox."""

Notebook = dict[str, Any]
Act = Callable[[Notebook, Path], None]


def hand_in(course: Path, learner: str, act: Act, stamp: str = "2026-11-20 12:00:00 UTC") -> Path:
    """Write the released notebook, changed by `act`, into nbgrader's submitted/, and return its path."""
    notebook = json.loads((course / "release" / SLUG / f"{SLUG}.ipynb").read_text())
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    folder = course / "submitted" / learner / SLUG
    folder.mkdir(parents=True)
    (folder / "timestamp.txt").write_text(stamp)
    act(notebook, course)
    path = folder / f"{SLUG}.ipynb"
    path.write_text(json.dumps(notebook))
    return path


def marks(cell: Notebook) -> dict[str, Any]:
    return cell["metadata"].get("nbgrader", {})


def code(source: str) -> Notebook:
    return {"cell_type": "code", "source": source, "metadata": {}, "outputs": [], "execution_count": None}


def text(source: str) -> Notebook:
    return {"cell_type": "markdown", "source": source, "metadata": {}}


def right(notebook: Notebook, course: Path) -> None:
    solution = json.loads((CHECKOUT / "solutions" / f"{SLUG}.ipynb").read_text())
    sources = {c["metadata"].get("grade"): "".join(c["source"]) for c in solution["cells"]}
    for cell in notebook["cells"]:
        if grade := cell["metadata"].get("grade"):
            cell["source"] = sources[grade]


def wrong(notebook: Notebook, course: Path) -> None:
    """Fill in everything rightly except `merge`, with outputs that claim success."""
    right(notebook, course)
    for cell in notebook["cells"]:
        if cell["metadata"].get("grade") == "02.merge":
            cell["source"] = submission("02/wrong_adds").source
        if marks(cell).get("grade"):
            result = {"output_type": "execute_result", "execution_count": 1, "metadata": {}}
            cell["outputs"] = [{**result, "data": {"text/plain": str(marks(cell)["points"])}}]


def untouched(notebook: Notebook, course: Path) -> None:
    """Leave the notebook as it was released."""


def hostile(notebook: Notebook, course: Path) -> None:
    """Overwrite the check cells, add code that rewrites the gradebook, and inject HTML for the instructor."""
    book = course / "gradebook.db"
    attack = (
        "import ringlab_course, ringlab_course.checking.reports, builtins\n"
        "check = ringlab_course.check = lambda *a, **k: print('all passed')\n"
        f"open({str(course / MARKER)!r}, 'w').write('run')\n"
        "import sqlite3\n"
        f"book = sqlite3.connect({str(book)!r})\n"
        "book.execute('UPDATE grade SET auto_score = 100, manual_score = 100')\nbook.commit()"
    )
    quiet = "\n".join(
        f"try:\n    exec({line!r}, globals())\nexcept BaseException: pass" for line in attack.splitlines()
    )
    for cell in notebook["cells"]:
        if marks(cell).get("grade"):
            cell["source"] = f"{quiet}\n11"
        elif cell["metadata"].get("grade"):
            cell["source"] = f"{cell['source']}\n{quiet}"
    notebook["cells"].insert(0, code(quiet))
    notebook["cells"].append(
        text("```\n<script>document.title = 'stolen'</script>\n<img src=x onerror=alert(1)>")
    )


def missing(notebook: Notebook, course: Path) -> None:
    """Remove every cell with points, and the second stage."""
    right(notebook, course)
    notebook["cells"] = [
        c
        for c in notebook["cells"]
        if not marks(c).get("grade") and c["metadata"].get("grade") != "02.update"
    ]


def rewritten(notebook: Notebook, course: Path) -> None:
    """Change metadata that nbgrader would fail to read, and claim more points and another exercise."""
    right(notebook, course)
    notebook["metadata"]["ringlab"] = {"exercise": "00"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["metadata"].get("grade"):
            cell["metadata"] = {
                "nbgrader": {**marks(cell), "schema_version": 99, "grade_id": 7, "grade": True}
            }
        elif marks(cell).get("grade"):
            cell["metadata"]["nbgrader"] |= {"points": 1000, "grade_id": "02-merge-check", "task": "yes"}
        elif number % 2:
            cell["metadata"]["nbgrader"] = [{"grade": True}, "x", None][number % 3]


def broken(course: Path, learner: str = "broken") -> Path:
    path = hand_in(course, learner, right)
    path.write_bytes(path.read_bytes()[:-200] + b"\xff")
    return path


def linked(course: Path, learner: str = "linked") -> Path:
    """Replace the notebook by a link to another learner's."""
    path = hand_in(course, learner, untouched)
    path.unlink()
    os.symlink(course / "submitted" / "right" / SLUG / path.name, path)
    return path


ACTS: dict[str, Act] = {
    "right": right,
    "wrong": wrong,
    "untouched": untouched,
    "hostile": hostile,
    "missing": missing,
    "rewritten": rewritten,
}


def a_class(course: Path) -> dict[str, Path]:
    """Hand in a notebook of every kind; return the paths by learner."""
    paths = {learner: hand_in(course, learner, act) for learner, act in ACTS.items()}
    return paths | {"broken": broken(course), "linked": linked(course)}
