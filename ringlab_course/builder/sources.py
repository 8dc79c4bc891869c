"""Turn a py:percent source into a notebook without outputs, with ids, skeletons, metadata and hashes."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from ringlab.errors import CourseError
from ringlab_course.builder.lint import LONGEST_LINE
from ringlab_course.catalogue import CAPSTONE, COURSE
from ringlab_course.checking.loading import exercise_ids, load_exercise

SOLUTION_ONLY = "solution-only"
"""Cells with this tag are in the solution but not in the skeleton."""
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}
_BEGIN = re.compile(r"^(?P<indent>\s*)# BEGIN SOLUTION\s*(?P<task>.*?)\s*$")
_END = re.compile(r"^\s*# END SOLUTION\s*$")
_PREDICT = re.compile(r"""\bpredict\(\s*["'](?P<key>[^"']+)["']""")
_COMPARE = re.compile(r"""\bcompare\(\s*["'](?P<key>[^"']+)["']""")
_CHECK = re.compile(r"""^check\(["'](?P<stage>\d\d\.\w+)["']\)$""", re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """One notebook to build; `kind` is "lesson", "exercise" (the skeleton) or "solution"."""

    kind: str
    slug: str
    source: Path
    path: Path

    @property
    def executed(self) -> bool:
        """Whether the notebook is executed and contains outputs."""
        return self.kind != "exercise"


def targets(root: Path, names: tuple[str, ...] = ()) -> list[Target]:
    """Return the notebooks to build under `root`, lessons first, sorted by source name.

    `names` selects some of them: "05" or "05_emulated_ring" selects the lesson, the exercise and its
    solution; "exercises/05", "solutions/05" or "notebooks/05" selects one notebook.
    """
    found = []
    course = root / "ringlab_course"
    for source in sorted((course / "lessons").glob("[0-9][0-9]_*.py")):
        found.append(Target("lesson", source.stem, source, root / "notebooks" / f"{source.stem}.ipynb"))
    for source in sorted((course / "exercises").glob("e[0-9][0-9]_*/exercise.py")):
        slug = source.parent.name[1:]
        for kind, folder in (("exercise", "exercises"), ("solution", "solutions")):
            found.append(Target(kind, slug, source, root / folder / f"{slug}.ipynb"))
    for name in names:
        if not any(_matches(target, name) for target in found):
            known = ", ".join(sorted({target.slug for target in found})) or "no sources at all"
            raise CourseError(f"a lesson or exercise under {course}: {known}", repr(name))
    return [target for target in found if not names or any(_matches(target, name) for name in names)]


def prepare(target: Target, root: Path) -> NotebookNode:
    """Return the complete notebook of `target`, except for its outputs."""
    notebook = read_percent(target.source)
    if target.kind == "exercise":
        notebook.cells = [
            cell for cell in notebook.cells if SOLUTION_ONLY not in cell.metadata.get("tags", [])
        ]
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.source = skeleton(cell.source, cell.metadata.get("grade", ""), str(target.source))
    if target.kind == "lesson":
        _hide_answers(notebook)
        notebook.cells[-1].source += f"\n\n{_after(target)}"
    else:
        _add_nbgrader(notebook, target.slug[:2])
    _set_ids(notebook)
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.metadata["ringlab"] = {
        "cells": cells_hash(notebook),
        "kind": target.kind,
        "source": target.source.relative_to(root).as_posix(),
    }
    return notebook


def read_percent(source: Path) -> NotebookNode:
    """Return the notebook that a jupytext py:percent file describes, as nbformat 4.5."""
    import jupytext

    read = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    notebook = nbformat.v4.new_notebook()
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in read.cells:
        make = nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        metadata = {key: value for key, value in cell.metadata.items() if key != "lines_to_next_cell"}
        notebook.cells.append(make(cell.source, metadata=metadata))
    return notebook


def skeleton(source: str, grade: str = "", where: str = "this source") -> str:
    """Return a cell's source with every solution region replaced by a `raise` that says what to write.

    Raises: CourseError for a region that is not closed, is outside of a function, or does not say what to
    write.
    """
    lines: list[str] = []
    inside = False
    for line in source.splitlines():
        begin = _BEGIN.match(line)
        if (begin and inside) or (_END.match(line) and not inside):
            raise CourseError(
                "alternating lines BEGIN SOLUTION and END SOLUTION", f"{line.strip()!r} in {where}"
            )
        if begin:
            if not begin["indent"] or not begin["task"]:
                raise CourseError(
                    "`# BEGIN SOLUTION what to write`, inside a function", f"{line!r} in {where}"
                )
            task = f"{grade}: {begin['task']}" if grade else begin["task"]
            lines += _stub(begin["indent"], _quoted(task))
            inside = True
        elif _END.match(line):
            inside = False
        elif not inside:
            lines.append(line)
    if inside:
        raise CourseError("an END SOLUTION for every BEGIN SOLUTION", f"one left open in {where}")
    return "\n".join(lines)


def _stub(indent: str, task: str) -> list[str]:
    line = f"{indent}raise NotImplementedError({task})"
    if len(line) <= LONGEST_LINE:
        return [line]
    return [f"{indent}raise NotImplementedError(", f"{indent}    {task}", f"{indent})"]


def cells_hash(notebook: NotebookNode) -> str:
    """Return a hash of the cells' types and sources, which changes when somebody edits a cell."""
    return _hash("\0".join(f"{cell.cell_type}\n{cell.source}" for cell in notebook.cells))


def outputs_hash(notebook: NotebookNode) -> str:
    """Return a hash of all outputs."""
    import json

    outputs = [cell.get("outputs", []) for cell in notebook.cells]
    return _hash(json.dumps(outputs, sort_keys=True))


def is_edited(notebook: NotebookNode) -> bool:
    """Return whether the cells differ from those that were built; True also if no hash is recorded."""
    return notebook.metadata.get("ringlab", {}).get("cells") != cells_hash(notebook)


def _matches(target: Target, name: str) -> bool:
    folder, _, stem = name.rpartition("/")
    stem = stem.removesuffix(".ipynb").removesuffix(".py")
    kinds = {"lessons": "notebooks", "exercise": "exercises", "ringlab_course/lessons": "notebooks"}
    if folder and kinds.get(folder, folder) != target.path.parent.name:
        return False
    return stem in (target.slug, target.slug[:2])


def _after(target: Target) -> str:
    """Return the last line of a lesson, which leads to the next one."""
    following = next((after for before, after in pairwise(COURSE) if before.slug == target.slug), None)
    if following is None:
        return "This was the last lesson. [After the course](../docs/after-the-course.md) says where to go from here."
    folder = "../exercises/" if following is CAPSTONE else ""
    return f"**Next:** [{following.id} · {following.title}]({folder}{following.slug}.ipynb)"


def _set_ids(notebook: NotebookNode) -> None:
    """Give every cell an id made from its grade id or its content, with a counter for equal ids."""
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        grade = cell.metadata.get("grade")
        name = f"grade-{grade.replace('.', '-')}" if grade else _hash(f"{cell.cell_type}\n{cell.source}")[:12]
        seen[name] = seen.get(name, 0) + 1
        cell.id = name if seen[name] == 1 else f"{name}-{seen[name]}"


def _hide_answers(notebook: NotebookNode) -> None:
    """Hide the recorded outputs between each prediction and its comparison.

    JupyterLab shows them once the cells are run.
    """
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    asked = {found["key"]: n for n, cell in enumerate(code) for found in _PREDICT.finditer(cell.source)}
    for number, cell in enumerate(code):
        for found in _COMPARE.finditer(cell.source):
            for answer in code[asked.get(found["key"], number) + 1 : number + 1]:
                answer.metadata["jupyter"] = {"outputs_hidden": True}


def _add_nbgrader(notebook: NotebookNode, exercise_id: str) -> None:
    """Mark graded functions as nbgrader's solution cells, and their `check(...)` as its graded cells."""
    stages = load_exercise(exercise_id).stages if exercise_id in exercise_ids() else ()
    points = {stage.id: stage.points for stage in stages}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        checked = _CHECK.search(cell.source)
        if grade := cell.metadata.get("grade"):
            cell.metadata["nbgrader"] = _nbgrader(grade.replace(".", "-"), solution=True)
        elif checked and checked["stage"] in points:
            name = checked["stage"].replace(".", "-") + "-check"
            cell.metadata["nbgrader"] = _nbgrader(name, points=points[checked["stage"]])


def _nbgrader(grade_id: str, *, solution: bool = False, points: int | None = None) -> dict[str, Any]:
    entry: dict[str, Any] = {"grade_id": grade_id, "schema_version": 3, "solution": solution, "task": False}
    entry |= {"grade": points is not None, "locked": points is not None}
    return entry if points is None else entry | {"points": points}


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
