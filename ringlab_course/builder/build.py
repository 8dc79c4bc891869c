"""Build notebooks from their sources, and find notebooks that no longer match their sources.

`ringlab_course/lessons/*.py` give `notebooks/` (executed). `ringlab_course/exercises/*/exercise.py` give
`exercises/` (skeletons without outputs) and `solutions/` (executed). Only the sources are edited by hand.

`check` is quick because it runs no cell. It builds every notebook from its source and compares the cells, so
it always finds a changed source, skeleton, id or metadata. It also compares the outputs with the hash taken
when they were recorded, so it finds an output that was edited by hand. Only nbval, or `check` with `rerun`,
tests whether running the cells still gives these outputs.

A notebook whose cells were edited is somebody's work and is never overwritten. An edited exercise does not
count as drift, except in CI, where nobody works in it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from ringlab.errors import CourseError, RinglabError
from ringlab_course.builder.execution import execute
from ringlab_course.builder.lint import lint
from ringlab_course.builder.sources import Target, is_edited, outputs_hash, prepare, targets

BAD = ("refused", "drift", "failed")


@dataclass(frozen=True)
class Result:
    """The outcome for one notebook: written, unchanged, edited, refused, drift or failed."""

    path: Path
    action: str
    message: str = ""

    @property
    def ok(self) -> bool:
        """Whether the notebook needs no further attention."""
        return self.action not in BAD


def find_root() -> Path:
    """Return the nearest folder that contains ringlab_course/lessons, from the current folder upwards.

    If there is none, return the checkout that contains this module. Raises: CourseError if that has no
    lessons either, or if the current folder and the running code are in different checkouts.
    """
    here, own = Path.cwd(), Path(__file__).resolve().parents[2]
    for folder in (here, *here.parents, own):
        if (folder / "ringlab_course" / "lessons").is_dir():
            if (folder / "ringlab_course" / "builder").is_dir() and folder.resolve() != own:
                raise CourseError(
                    f"the ringlab of this checkout, {folder}", f"the ringlab of {own}",
                    f"run {folder / '.venv/bin/ringlab'}, after `make setup-lab` if it is not there",
                )  # fmt: skip
            return folder
    raise CourseError(
        "a folder with ringlab_course/lessons", str(here), "run this in a checkout of the course"
    )


def build(
    names: Sequence[str] = (), *, root: Path | None = None, report: Callable[[Result], None] | None = None
) -> list[Result]:
    """Build the notebooks in `names`, or all, and return a result for each; pass each result to `report`."""
    return _each(names, root, report, _build_one)


def check(
    names: Sequence[str] = (),
    *,
    root: Path | None = None,
    rerun: bool = False,
    report: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Compare the notebooks with their sources. With `rerun`, run them again and compare every byte."""
    return _each(names, root, report, _rerun_one if rerun else _check_one)


def fresh(name: str, *, root: Path | None = None) -> tuple[Path, Path | None]:
    """Write a fresh copy of an exercise, given its number such as "05".

    Return its path, and the path to which an edited notebook was moved, or None if there was no edited one.
    """
    root = root or find_root()
    if name in ("", "exercises/"):
        raise CourseError("the number of an exercise, as in 05", repr(name))
    target = targets(root, (name if "/" in name else f"exercises/{name}",))[0]
    built = prepare(target, root)
    if target.executed:
        raise CourseError("an exercise", f"{target.path.name} of {target.path.parent.name}/")
    aside = None
    if target.path.exists() and is_edited(_read(target.path)):
        aside = _free_name(target.path)
        os.replace(target.path, aside)
    _write(built, target.path)
    return target.path, aside


def _each(
    names: Sequence[str],
    root: Path | None,
    report: Callable[[Result], None] | None,
    act: Callable[[Target, Path], Result],
) -> list[Result]:
    root = root or find_root()
    results = []
    for target in targets(root, tuple(names)):
        try:
            result = act(target, root)
        except RinglabError as error:
            result = Result(target.path, "failed", str(error))
        results.append(result)
        if report is not None:
            report(result)
    return results


def _build_one(target: Target, root: Path) -> Result:
    if target.path.exists() and is_edited(_read(target.path)):
        return Result(target.path, "refused", _refusal(target))
    text = nbformat.writes(_made(target, root)) + "\n"
    if target.path.exists() and target.path.read_text(encoding="utf-8") == text:
        return Result(target.path, "unchanged")
    _write_text(text, target.path)
    return Result(target.path, "written")


def _made(target: Target, root: Path) -> NotebookNode:
    """Return the finished notebook; lessons and solutions are executed."""
    notebook = prepare(target, root)
    if target.executed:
        execute(notebook, target.path.parent)
        notebook.metadata["ringlab"]["outputs"] = outputs_hash(notebook)
    if problems := lint(notebook):
        raise CourseError("a notebook that follows the rules of the course", "; ".join(problems))
    return notebook


def _check_one(target: Target, root: Path) -> Result:
    if not target.path.exists():
        return Result(target.path, "drift", f"not built yet: ringlab build {target.slug}")
    built, wanted = _read(target.path), prepare(target, root)
    if _is_a_learners(built, target) and not os.environ.get("CI"):
        return Result(target.path, "edited", "yours, not checked")
    if difference := _difference(built, wanted, target):
        return Result(target.path, "drift", difference)
    return Result(target.path, "unchanged")


def _is_a_learners(built: NotebookNode, target: Target) -> bool:
    """Return whether somebody has worked in this exercise: its cells were edited, or it has outputs."""
    return target.kind == "exercise" and (
        is_edited(built) or any(cell.get("outputs") for cell in built.cells)
    )


def _rerun_one(target: Target, root: Path) -> Result:
    if not (quick := _check_one(target, root)).ok:
        return quick
    with tempfile.TemporaryDirectory() as scratch:
        again = replace(target, path=Path(scratch) / target.path.parent.name / target.path.name)
        wanted = _made(again, root)
    built = _read(target.path)
    for number, (old, new) in enumerate(zip(built.cells, wanted.cells, strict=True), 1):
        if old != new:
            return Result(
                target.path, "drift", f"cell {number} ({_first_line(new)}) gives another output now"
            )
    if target.path.read_text(encoding="utf-8") != nbformat.writes(wanted) + "\n":
        return Result(target.path, "drift", "the notebook's metadata differ")
    return Result(target.path, "unchanged")


def _difference(built: NotebookNode, wanted: NotebookNode, target: Target) -> str:
    """Return the first difference between a notebook and the one that its source gives, or ""."""
    for number, (old, new) in enumerate(zip(built.cells, wanted.cells, strict=False), 1):
        for field in ("cell_type", "source", "id", "metadata"):
            if old.get(field) != new.get(field):
                return f"cell {number} ({_first_line(new)}): its {field} differs from {target.source.name}"
    if len(built.cells) != len(wanted.cells):
        return f"{len(built.cells)} cells, {len(wanted.cells)} in {target.source.name}"
    recorded = dict(built.metadata.get("ringlab", {}))
    outputs = recorded.pop("outputs", None)
    if recorded != wanted.metadata["ringlab"]:
        return "its metadata differ from those of a build"
    if target.executed and outputs != outputs_hash(built):
        return "its outputs are not those that were recorded"
    if not target.executed and any(cell.get("outputs") for cell in built.cells):
        return "a skeleton with outputs"
    return ""


def _refusal(target: Target) -> str:
    if target.kind == "exercise":
        remedy = f"ringlab exercise fresh {target.slug[:2]} writes a fresh copy and keeps this one beside it"
    else:
        remedy = f"save it under another name, or delete it, then: ringlab build {target.slug}"
    return f"left alone, as its cells were edited; {remedy}"


def _free_name(path: Path) -> Path:
    count = 1
    while (aside := path.with_name(f"{path.stem}.mine-{count}.ipynb")).exists():
        count += 1
    return aside


def _first_line(cell: Any) -> str:
    return repr((cell.source.splitlines() or [""])[0][:60])


def _read(path: Path) -> NotebookNode:
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:  # the file is kept even if it is damaged, as it is the user's
        remedy = "move it away"
        raise CourseError(f"a notebook in {path}", f"{type(error).__name__}: {error}", remedy) from None


def _write(notebook: NotebookNode, path: Path) -> None:
    _write_text(nbformat.writes(notebook) + "\n", path)


def _write_text(text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
