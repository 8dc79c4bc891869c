"""The sources of all pages, written into one folder for Sphinx: lessons with their outputs, exercises as skeletons.

Nothing of it is committed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from ringlab_course.builder.build import find_root
from ringlab_course.builder.sources import Target, prepare, targets

from . import api, front, kill_matrix, misconceptions
from .links import slug

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def write(folder: Path, root: Path | None = None, run_answers: bool = True) -> None:
    """Write the sources of the pages of the checkout at `root` into `folder`, which is emptied first.

    `run_answers`: run every wrong answer for the page that says which check finds it.
    """
    root = root or find_root()
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in _texts(root, run_answers):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _texts(root: Path, run_answers: bool) -> Iterator[tuple[str, str]]:
    """Yield (file, text) of every page. Solutions are no page."""
    every = targets(root)
    lessons = [target for target in every if target.kind == "lesson"]
    exercises = [target for target in every if target.kind == "exercise"]
    documents = {
        path.relative_to(root / "docs").with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((root / "docs").rglob("*.md"))
    }
    documents[kill_matrix.NAME] = kill_matrix.page(run_answers)
    known = {f"docs/{name}.md" for name in documents} | {f"{room}/index.md" for room in front.ROOMS}
    known |= {f"notebooks/{target.path.name}" for target in lessons}
    known |= {f"exercises/{target.path.name}" for target in exercises}
    yield "index.md", only_known_links(front.front(lessons, [*documents]), "", known)
    practice = {target.slug[:2]: target.slug for target in exercises}
    for target in lessons:
        lesson = lesson_page(target, practice.get(target.slug[:2]))
        yield f"notebooks/{target.slug}.ipynb", _written(lesson, "notebooks", known)
    titles = {}
    for target in exercises:
        skeleton = exercise_page(target, root)
        titles[target.slug] = title(skeleton)
        yield f"exercises/{target.slug}.ipynb", _written(skeleton, "exercises", known)
    yield "exercises/index.md", front.exercise_list(exercises, titles)
    for name, text in documents.items():
        file = f"docs/{name}.md"
        yield file, only_known_links(text, file.rpartition("/")[0], known)
    for pages in (misconceptions.pages({*titles}), api.pages(root)):
        for name, text in pages:
            yield f"{name}.md", text


def _written(page: nbformat.NotebookNode, folder: str, known: set[str]) -> str:
    for cell in page.cells:
        if cell.cell_type == "markdown":
            cell.source = only_known_links(cell.source, folder, known)
    return nbformat.writes(page)


def only_known_links(text: str, folder: str, known: set[str]) -> str:
    """Return `text` of a page in `folder` with links to files that are no pages turned into the files' names."""

    def replaced(found: re.Match[str]) -> str:
        path = _normal(f"{folder}/{found[2]}")
        if path in known:
            return found[0]
        return found[1] if found[1].strip("`") == path else f"{found[1]} (`{path}`)"

    return _LINK.sub(replaced, text)


def _normal(path: str) -> str:
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


_HEADING = re.compile(r"^## ", re.MULTILINE)
_RUN_IT = """\
:::{{admonition}} Read it here, or run it
:class: tip
What the cells print and draw below was recorded. Where a picture moves or a prediction is asked for, a still stands
here. To play them, and to predict before you see: `make lab`, then open `{path}`.{exercise}
:::"""


def lesson_page(target: Target, exercise: str | None) -> NotebookNode:
    """Return the lesson with the outputs it has in the checkout; `exercise` is the slug of its exercise."""
    notebook = nbformat.read(target.path, as_version=4)
    for cell in notebook.cells:
        _describe_pictures(cell, target.path)
    then = f" Its exercise: [{exercise[:2]}](../exercises/{exercise}.ipynb)." if exercise else ""
    text = _RUN_IT.format(path=f"notebooks/{target.path.name}", exercise=then)
    notebook.cells.insert(1, nbformat.v4.new_markdown_cell(text))
    return notebook


def exercise_page(target: Target, root: Path) -> NotebookNode:
    """Return the skeleton, made from the source: what a learner wrote into `exercises/` is never published."""
    notebook = prepare(target, root)
    heading: Any = None
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and _HEADING.search(cell.source):
            heading = cell
        if stage := cell.metadata.get("grade"):
            anchor = f"({stage_anchor(stage)})=\n"
            if heading is None:
                cell_before = nbformat.v4.new_markdown_cell(anchor + f"## {stage}")
                notebook.cells.insert(notebook.cells.index(cell), cell_before)
            else:
                heading.source = _HEADING.sub(anchor + "## ", heading.source, count=1)
            heading = None
    return notebook


def stage_anchor(stage_id: str) -> str:
    """Return where a stage begins on the page of its exercise."""
    return slug("stage", stage_id)


def title(notebook: NotebookNode) -> str:
    """Return the heading of a notebook."""
    found = re.search(r"^# (.+)$", notebook.cells[0].source, re.MULTILINE)
    if found is None:
        raise ValueError("needed: a notebook that begins with a heading")
    return found[1]


def _describe_pictures(cell: Any, path: Path) -> None:
    """Hand the description that each picture carries to the page: Sphinx takes it from the cell."""
    pictures = [
        output
        for output in cell.get("outputs", [])
        if any("image/" in kind for kind in output.get("data", {}))
    ]
    found = [
        of_kind["alt"]
        for output in pictures
        for of_kind in output.get("metadata", {}).values()
        if isinstance(of_kind, dict) and of_kind.get("alt")
    ]
    if len(found) != len(pictures) or len(pictures) > 1:
        raise ValueError(
            f"needed: one described picture a cell\n   got: {len(pictures)} pictures, {len(found)} descriptions "
            f"in {path.name}: {cell.source[:60]!r}"
        )
    if found:
        cell.metadata["mystnb"] = {"image": {"alt": " ".join(found[0].split())}}
