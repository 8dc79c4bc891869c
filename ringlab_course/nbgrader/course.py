"""Set up an nbgrader course folder: write its configuration, and the exercises as assignments in source/."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from ringlab.errors import CourseError
from ringlab_course.builder.build import find_root
from ringlab_course.builder.sources import SOLUTION_ONLY, Target, cells_hash, is_edited, prepare, targets

_BEGIN = re.compile(r"^(?P<indent>[ \t]+)# BEGIN SOLUTION (?P<task>.*)$", re.MULTILINE)
CONFIG_NAME = "nbgrader_config.py"
MARK = "ringlab_course.nbgrader.converters.Judged"
CONFIG = f"""\
# Scores come from ringlab's judge, in its sandbox; nbgrader itself runs nothing that learners hand in.
# Written by `ringlab nbgrader config`. Keep these three settings together: each is needed.
c = get_config()  # noqa
c.Autograde.exporter_class = "ringlab_course.nbgrader.converters.Submitted"
c.Autograde.sanitize_preprocessors = []
c.Autograde.autograde_preprocessors = [
    "{MARK}",
    "ringlab_course.nbgrader.converters.Saved",
    "nbgrader.preprocessors.AssignLatePenalties",
]
"""


def write_config(folder: Path) -> Path:
    """Write the course folder's configuration and return its path; keep a file that has our settings.

    Raises: CourseError if the file exists without our settings.
    """
    path = folder / CONFIG_NAME
    if path.exists():
        text = path.read_text(encoding="utf-8")
        if MARK in text:
            return path
        remedy = f"add to it what `ringlab nbgrader config --show` prints: {path}"
        raise CourseError(
            f"no {CONFIG_NAME} yet, or one with ringlab's settings",
            "a configuration without ringlab's settings",
            remedy,
        )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(CONFIG, encoding="utf-8")
    return path


def release(names: tuple[str, ...], folder: Path) -> list[Path]:
    """Write exercises ("05") into the course folder's source/, one assignment each, and return their paths.

    They have nbgrader's metadata: solution cells, which nbgrader clears for learners, and locked cells that
    hold each stage's points. Raises: CourseError for an unknown exercise, and if a notebook in source/ was
    edited.
    """
    root = find_root()
    chosen = [t for name in names for t in _exercises(root, name)]
    paths = [folder / "source" / t.slug / f"{t.slug}.ipynb" for t in chosen]
    for path in paths:
        if path.exists() and not _as_written(path):
            raise CourseError("an unedited source notebook", f"{path}, edited", "move it away first")
    for target, path in zip(chosen, paths, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(nbformat.writes(source_notebook(target, root)) + "\n", encoding="utf-8")
    return paths


def source_notebook(target: Target, root: Path) -> NotebookNode:
    """Return the instructor's version of an exercise, with solutions between nbgrader's marks."""
    notebook = prepare(target, root)
    notebook.cells = [cell for cell in notebook.cells if SOLUTION_ONLY not in cell.metadata.get("tags", [])]
    for cell in notebook.cells:
        cell.source = _BEGIN.sub(r"\g<indent># To write: \g<task>\n\g<indent>### BEGIN SOLUTION", cell.source)
        cell.source = cell.source.replace("# END SOLUTION", "### END SOLUTION")
    notebook.metadata["ringlab"]["cells"] = cells_hash(notebook)
    return notebook


def _as_written(path: Path) -> bool:
    try:
        return not is_edited(nbformat.read(path, as_version=4))
    except (ValueError, LookupError, AttributeError, nbformat.ValidationError):
        return False  # the file is kept even if it is damaged, as it is the user's


def _exercises(root: Path, name: str) -> list[Target]:
    found = targets(root, (f"solutions/{name}",))
    if not name or any(target.kind != "solution" for target in found):
        raise CourseError("the number of an exercise, as in 05", repr(name))
    return found
