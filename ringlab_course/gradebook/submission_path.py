"""Whose submission a path is, and of which exercise, as far as the path says."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from ringlab_course.catalogue import CAPSTONE, LESSONS
from ringlab_course.checking.loading import exercise_ids
from ringlab_course.gradebook.printable import shown_name

_COPY = re.compile(r"(?:-Copy\d*| ?\(\d+\))$")
_SEPARATORS = "_. -"


def learner_of(path: Path, root: Path, exercise: str) -> str:
    """Return the learner whose notebook `path` is, found in the folder (or given as the file) `root`.

    In nbgrader's tree it is the folder below submitted/, else the first folder below `root` that is
    not called as an exercise is. A notebook without such a folder is called after its learner, as in
    alice_05.ipynb; if it is called as the exercise is, its folder is the learner's.
    """
    path, root = _absolute(path), _absolute(root)
    if nbgrader_folder(path, root) is not None:
        return shown_name(path.parts[-3])
    below = path.relative_to(root).parts[:-1] if root != path else ()
    for folder in below:
        if not exercise_named(folder):
            return shown_name(folder)
    rest = _without_exercise(path.name.removesuffix(".ipynb"), exercise)
    return shown_name(rest or (root.name if root != path else root.parent.name) or "/")


def exercise_of(path: Path) -> str:
    """Return the exercise that the path names: 05_emulated_ring as a folder or file, or …_05.ipynb; or ""."""
    stem = _COPY.sub("", path.name.removesuffix(".ipynb"))
    for identifier, slug in _slugs().items():
        if stem == slug or stem.startswith(slug) or stem.endswith(slug):
            return identifier
    last = re.search(rf"[{_SEPARATORS}](\d\d)$", stem)
    if last and last[1] in exercise_ids():
        return last[1]
    return exercise_named(path.parent.name)


def exercise_named(folder: str) -> str:
    """Return the exercise that is called exactly `folder`, as in 05_emulated_ring, or "".

    A bare number may as well be a learner's.
    """
    return next((identifier for identifier, slug in _slugs().items() if slug == folder), "")


def nbgrader_folder(path: Path, root: Path) -> Path | None:
    """Return the folder of one assignment of one learner in nbgrader's submitted/, or None.

    submitted/ is `root`, above it or right in it: further below it is a learner's, who may call
    folders as they like.
    """
    folder, root = _absolute(path).parent, _absolute(root)
    tree = folder.parent.parent
    if tree.name != "submitted" or not (root.is_relative_to(tree) or tree.parent == root):
        return None
    stamped = (folder / "timestamp.txt").is_file()
    return folder if stamped or exercise_named(folder.name) else None


def _without_exercise(stem: str, exercise: str) -> str:
    """alice_05 → alice; 05_emulated_ring (1) → ""; what names another exercise, or none, stays whole."""
    short = _COPY.sub("", stem)
    for name in filter(None, (_slugs().get(exercise, ""), exercise)):
        if short == name and name != exercise:
            return ""
        for rest in (short.removeprefix(name), short.removesuffix(name)):
            if rest != short and rest.strip(_SEPARATORS) != rest:
                return rest.strip(_SEPARATORS)
    return stem


@cache
def _slugs() -> dict[str, str]:
    return {lesson.id: lesson.slug for lesson in (*LESSONS, CAPSTONE) if lesson.id in exercise_ids()}


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))
