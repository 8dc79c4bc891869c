"""Lessons with their recorded outputs, and exercises as skeletons, prepared as pages."""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from ringlab.viz.frontend import FRAMES
from ringlab_course.builder.sources import Target, prepare
from ringlab_course.notebook.predictions import ROOM

from . import opening
from .links import slug

NONE_MADE = " (no prediction was made)"
_HEADING = re.compile(r"^## ", re.MULTILINE)
_RUN_IT = """\
{play}:::{{admonition}} Read it here, or run it
:class: run-it
:collapsible: closed
What the cells print and draw below was recorded; a few pictures have more controls in the notebook. Questions can be answered here,
before you see what was measured. \
{download}{exercise}
:::"""
_PLAY = '<p class="doors"><a class="door" href="../play.html#{state}">Play with what this lesson shows</a></p>\n\n'
_DOWNLOAD = (
    "To change the code, run `make lab` in a checkout and open `{path}`. "
    "Or {{download}}`download the notebook </{downloads}/{path}>`; it needs ringlab [installed](../docs/guide/install.md)."
)
_PLAYED = {
    "05": "layout=contiguous&mask=full&schedule=ring&P=4&S=15",
    "06": "layout=zigzag&mask=causal&schedule=ring&P=8&S=14&speed=-4",
    "07": "layout=contiguous&mask=causal&schedule=ring&P=8&S=17",
    "08": "layout=zigzag&mask=causal&schedule=ring&P=8&S=17",
    "15": "layout=zigzag&mask=causal&schedule=ring&P=16&S=16",
}
"""The state of the playground that shows the subject of a lesson, by the lesson's number."""
DOWNLOADS = "downloads"
"""The folder with the notebooks as they are in a checkout; these are files without a page."""


def lesson_page(target: Target, exercise: str | None) -> NotebookNode:
    """Return the lesson with its outputs in the checkout; `exercise` is the slug of its exercise."""
    notebook = nbformat.read(target.path, as_version=4)
    for cell in notebook.cells:
        _describe_pictures(cell, target.path)
    opening.add(notebook, target.slug[:2])
    for cell in notebook.cells:
        _play(cell)
        _ask(cell)
        _mark_answer(cell)
        _fold_imports(cell)
        _fold_descriptions(cell)
    _keep_one_title(notebook)
    then = f" Its exercise: [{exercise[:2]}](../exercises/{exercise}.ipynb)." if exercise else ""
    state = _PLAYED.get(target.slug[:2])
    play = _PLAY.format(state=state) if state else ""
    text = _RUN_IT.format(play=play, exercise=then, download=_download(target))
    notebook.cells.insert(1, _cell(text, "download"))
    return notebook


def _fold_imports(cell: NotebookNode) -> None:
    """Fold a cell that only imports, since nobody reads a lesson for its imports."""
    if cell.cell_type != "code":
        return
    try:
        body = ast.parse(cell.source).body
    except SyntaxError:
        return
    if body and all(isinstance(each, ast.Import | ast.ImportFrom) for each in body):
        cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-input"]


def _fold_descriptions(cell: NotebookNode) -> None:
    """Replace a picture's description by an ellipsis in the code of the page, since the picture has it as alt text."""
    if cell.cell_type != "code" or "show(" not in cell.source:
        return
    lines = [line.encode() for line in cell.source.splitlines(keepends=True)]  # ast counts in bytes
    calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: -node.lineno):
        match call:
            case ast.Call(func=ast.Name("show"), args=[_, (ast.Constant(str()) | ast.JoinedStr()) as said]):
                first, last = said.lineno - 1, (said.end_lineno or said.lineno) - 1
                kept = lines[first][: said.col_offset] + '"…"'.encode() + lines[last][said.end_col_offset :]
                lines[first : last + 1] = [kept]
    cell.source = b"".join(lines).decode()


def _cell(text: str, name: str) -> NotebookNode:
    """Return a Markdown cell with the id `name`, because a random id would make each build differ."""
    return nbformat.v4.new_markdown_cell(text, id=name)


def _download(target: Target) -> str:
    return _DOWNLOAD.format(path=path(target), downloads=DOWNLOADS)


def path(target: Target) -> str:
    """Return the path of a notebook in a checkout."""
    return f"{target.path.parent.name}/{target.path.name}"


def _keep_one_title(notebook: NotebookNode) -> None:
    """Turn the titles of a lesson's parts into second-level headings, because a page has only one title."""
    for cell in notebook.cells[1:]:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"^# ", "## ", cell.source, flags=re.MULTILINE)


def _play(cell: NotebookNode) -> None:
    """Show all recorded pictures of a player instead of its still picture; static/frames.js plays them."""
    for output in cell.get("outputs", []):
        if recorded := output.get("data", {}).get(FRAMES):
            named = zip(recorded["names"], recorded["pictures"], strict=True)
            frames = (f'<div data-name="{html.escape(name)}">{picture}</div>' for name, picture in named)
            text = f'<div data-frames="{html.escape(recorded["step"])}">{"".join(frames)}</div>'
            output.data = nbformat.from_dict({"text/html": text, "text/plain": output.data["text/plain"]})


def _ask(cell: NotebookNode) -> None:
    """Replace the call that asks a question, the last statement of its cell, with the question itself.

    static/questions.js turns the question into a form, and hides the later cells until it is answered.
    """
    for output in cell.get("outputs", []):
        if f"height: {ROOM}" in output.get("data", {}).get("text/html", ""):
            call = _call(cell.source)
            key = ast.literal_eval(call.args[0])
            text = html.escape(output.data["text/plain"])
            output.data["text/html"] = f'<div data-question="{html.escape(key)}"><pre>{text}</pre></div>'
            if before := "".join(cell.source.splitlines(keepends=True)[: call.lineno - 1]).rstrip():
                cell.source = before
            else:  # MyST-NB leaves out a cell without source, and its outputs
                cell.metadata["tags"] = [*cell.metadata.get("tags", []), "remove-input"]


def _mark_answer(cell: NotebookNode) -> None:
    """Tag a cell that compares a prediction, and remove the text that no prediction was made.

    Readers of the page make their predictions on the page itself.
    """
    for output in cell.get("outputs", []):
        if output.output_type == "stream" and NONE_MADE in output.text:
            output.text = output.text.replace(NONE_MADE, "")
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), "measured"]


def _call(source: str) -> ast.Call:
    """Return the call of predict() with which a cell ends."""
    statement = ast.parse(source).body[-1]
    assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return statement.value


def exercise_page(target: Target, root: Path) -> NotebookNode:
    """Return the skeleton, made from the source, so that no learner's work in `exercises/` is published."""
    notebook = prepare(target, root)
    notebook.cells.insert(1, _cell(_download(target), "download"))
    heading: Any = None
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and _HEADING.search(cell.source):
            heading = cell
        if stage := cell.metadata.get("grade"):
            anchor = f"({stage_anchor(stage)})=\n"
            if heading is None:
                cell_before = _cell(anchor + f"## {stage}", stage_anchor(stage))
                notebook.cells.insert(notebook.cells.index(cell), cell_before)
            else:
                heading.source = _HEADING.sub(anchor + "## ", heading.source, count=1)
            heading = None
    return notebook


def stage_anchor(stage_id: str) -> str:
    """Return the anchor of a stage on the page of its exercise."""
    return slug("stage", stage_id)


def title(notebook: NotebookNode) -> str:
    """Return the heading of a notebook."""
    found = re.search(r"^# (.+)$", notebook.cells[0].source, re.MULTILINE)
    if found is None:
        raise ValueError("needed: a notebook that begins with a heading")
    return found[1]


def _describe_pictures(cell: Any, path: Path) -> None:
    """Copy the description of a cell's picture into the cell's metadata, where Sphinx reads it.

    Sphinx reads one description a cell, so each of several pictures becomes HTML with its own.
    """
    pictures = [
        output
        for output in cell.get("outputs", [])
        if any("image/" in kind for kind in output.get("data", {}))
    ]
    found = [
        " ".join(of_kind["alt"].split())
        for output in pictures
        for of_kind in output.get("metadata", {}).values()
        if isinstance(of_kind, dict) and of_kind.get("alt")
    ]
    if len(found) != len(pictures):
        raise ValueError(
            f"needed: pictures with descriptions\n   got: {len(pictures)} pictures, {len(found)} descriptions "
            f"in {path.name}: {cell.source[:60]!r}"
        )
    if len(found) == 1:
        cell.metadata["mystnb"] = {"image": {"alt": found[0]}}
        return
    for output, alt in zip(pictures, found, strict=True):
        source = f"data:image/png;base64,{output.data['image/png'].strip()}"
        text = f'<img alt="{html.escape(alt)}" src="{source}">'
        output.data = nbformat.from_dict({"text/html": text, "text/plain": output.data["text/plain"]})
