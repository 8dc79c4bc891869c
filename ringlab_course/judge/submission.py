"""Read a submitted notebook as data. Any file gives either cells or the reason why it is refused."""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ringlab.errors import CourseError
from ringlab_course.catalogue import COURSE
from ringlab_course.checking.loading import exercise_ids
from ringlab_course.checking.protocol import LIMITS

FILE_BYTES = 32 << 20
CELLS = 5000
CONTAINERS = 500_000
VALUES = 4_000_000
"""Limits on the lists and objects, and on all values, of a notebook.

A file full of brackets would grow fiftyfold when it is read. With these limits and FILE_BYTES, no file takes
more than 1 GB of memory or more than a few seconds.
"""


COPY = re.compile(r"(?:-Copy\d*| ?\(\d+\))$")
SEPARATORS = "_. -"
"""Characters between a learner and an exercise in a file's name. `COPY` matches the end of a copy's name."""


class UnreadableError(CourseError):
    """A submission that cannot be graded, with the reason in `got`."""


@dataclass(frozen=True)
class Cell:
    """One cell: its source, whether it is code, and the stage as which it is graded, if any."""

    source: str
    code: bool
    grade: str | None


@dataclass(frozen=True)
class Submission:
    """A notebook's cells; `exercise` is the exercise that its metadata name."""

    cells: tuple[Cell, ...]
    exercise: str | None

    @property
    def code(self) -> list[str]:
        """The sources of the code cells in order, with "" for every other cell, to keep the numbering."""
        return [cell.source if cell.code else "" for cell in self.cells]

    @property
    def mentions_torch(self) -> bool:
        """Whether any code cell contains the word torch."""
        return any("torch" in cell.source for cell in self.cells if cell.code)


def read_submission(path: str | os.PathLike[str]) -> Submission:
    """Return the cells of the notebook at `path`.

    Raises: UnreadableError for a link, a file that is too large or not a regular file, text that is not
    UTF-8, and JSON that is broken or not a notebook of format 4.
    """
    document = _parse(_read(Path(path)))
    if not isinstance(document, dict) or not isinstance(document.get("cells"), list):
        raise _unreadable("JSON that is not a notebook")
    if document.get("nbformat") != 4:
        form = document.get("nbformat")
        known = ascii(form)[:20] if isinstance(form, (int, float, str)) else "of another kind"
        raise _unreadable(f"notebook format {known}", "open and save it in JupyterLab")
    if len(document["cells"]) > CELLS:
        raise _unreadable(f"more than {CELLS} cells")
    cells = tuple(_cell(cell) for cell in document["cells"])
    submission = Submission(cells, _exercise(document, cells))
    _bound_code(submission)
    return submission


def is_notebook(name: str) -> bool:
    """Return whether a file is named like a notebook: *.ipynb, in any case."""
    return name.lower().endswith(".ipynb")


def exercise_of(path: Path) -> str:
    """Return the exercise that the path names, or "".

    Recognised are 05_emulated_ring as a folder or a file, and file names that end in _05.
    """
    stem = COPY.sub("", path.name[: -len(".ipynb")] if is_notebook(path.name) else path.name)
    for identifier, slug in slugs().items():
        if stem == slug or stem.startswith(slug) or stem.endswith(slug):
            return identifier
    last = re.search(rf"[{SEPARATORS}](\d\d)$", stem)
    if last and last[1] in exercise_ids():
        return last[1]
    return exercise_named(path.parent.name)


def exercise_named(folder: str) -> str:
    """Return the exercise whose full name is `folder`, such as 05_emulated_ring, or "".

    A bare number is not enough, because it may be a learner's.
    """
    return next((identifier for identifier, slug in slugs().items() if slug == folder), "")


@cache
def slugs() -> dict[str, str]:
    """Return the name of each exercise's notebook, by exercise."""
    return {lesson.id: lesson.slug for lesson in COURSE if lesson.id in exercise_ids()}


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "a symbolic link" if path.is_symlink() else f"a file that cannot be opened ({error.strerror})"
        raise _unreadable(why, "hand in the notebook itself") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _unreadable("something that is not a file")
        if status.st_size > FILE_BYTES:
            raise _unreadable(f"{status.st_size / 2**20:.0f} MiB", "clear the outputs before handing in")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(FILE_BYTES)
    finally:
        os.close(descriptor)


def _parse(data: bytes) -> Any:
    # Brackets and commas inside of text are counted too. Honest notebooks have far fewer than the limits.
    if data.count(b"[") + data.count(b"{") > CONTAINERS or data.count(b",") > VALUES:
        raise _unreadable("a file of too many small parts", "clear the outputs before handing in")
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _unreadable("text that is not UTF-8", "save the notebook in JupyterLab") from None
    except (ValueError, RecursionError):  # ValueError is also raised for integers of thousands of digits
        raise _unreadable("broken JSON", "save the notebook in JupyterLab") from None


def _cell(cell: Any) -> Cell:
    if not isinstance(cell, dict):
        raise _unreadable("a cell that is not a JSON object")
    source, metadata = cell.get("source", ""), cell.get("metadata", {})
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        raise _unreadable("a cell whose source is not text")
    grade = metadata.get("grade") if isinstance(metadata, dict) else None
    return Cell(source, cell.get("cell_type") == "code", grade if isinstance(grade, str) else None)


def _exercise(document: dict[str, Any], cells: tuple[Cell, ...]) -> str | None:
    metadata = document.get("metadata")
    own = metadata.get("ringlab") if isinstance(metadata, dict) else None
    if isinstance(own, dict) and isinstance(own.get("exercise"), str):
        return own["exercise"][:64]
    graded = Counter(cell.grade.partition(".")[0] for cell in cells if cell.grade)
    return graded.most_common(1)[0][0][:64] if graded else None


def _bound_code(submission: Submission) -> None:
    size = sum(map(len, submission.code))
    try:
        if size <= LIMITS.header // 2:
            size = len(json.dumps(submission.code, ensure_ascii=False).encode("utf-8"))
    except UnicodeEncodeError:
        raise _unreadable("text that is not Unicode (lone surrogates)") from None
    if size > LIMITS.header // 2:
        raise _unreadable(f"{size} bytes of code", f"at most {LIMITS.header // 2} bytes can be graded")


def _unreadable(got: str, remedy: str = "") -> UnreadableError:
    return UnreadableError("a Jupyter notebook", got, remedy)
