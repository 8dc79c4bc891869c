"""Finds and runs the sample submissions under tests/course/submissions: right ones and wrong ones."""

from __future__ import annotations

import functools
import linecache
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ringlab.course import builder, sources
from ringlab.course.contracts import load_exercise
from ringlab.course.reports import StageReport, run_in_process

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "submissions"
_HEADER = re.compile(
    r"# expects: check=(?P<stage>\d\d\.\w+):(?P<check>[\w-]+) misconception=(?P<name>[\w-]+)\s*$"
)


@dataclass(frozen=True)
class Expectation:
    """What a wrong submission's first line says: which check fails, and as which misconception."""

    stage: str
    check: str
    misconception: str | None


def exercises() -> list[str]:
    """Return the ids of the exercises that have submissions."""
    return sorted(folder.name for folder in FOLDER.iterdir() if any(folder.glob("*.py")))


def cases(items: Iterable[Any]) -> list[Any]:
    """Return exercise ids or submissions as cases of a test; some need Triton's interpreter, or JAX."""
    return [pytest.param(item, marks=_needs(item), id=named(item)) for item in items]


def _needs(item: Any) -> list[pytest.MarkDecorator]:
    kinds = _kinds(item.parent.name if isinstance(item, Path) else item)
    marks = {"kernel": pytest.mark.needs_interpreter, "mesh": pytest.mark.needs_jax}
    return [mark for kind, mark in marks.items() if kind in kinds]


def named(item: Any) -> str:
    """Return a case's name, as in 04/wrong_no_scale."""
    return f"{item.parent.name}/{item.stem}" if isinstance(item, Path) else item


@functools.cache
def _kinds(exercise_id: str) -> frozenset[str]:
    return frozenset(stage.kind for stage in load_exercise(exercise_id).stages)


def submissions(pattern: str) -> list[Path]:
    """Return all submissions whose file name matches, exercise by exercise."""
    return sorted(FOLDER.glob(f"[0-9][0-9]/{pattern}.py"))


def expectation(path: Path) -> Expectation:
    """Return what the submission's header promises."""
    first = path.read_text(encoding="utf-8").splitlines()[0]
    match = _HEADER.match(first)
    assert match, (
        f"{path.name} must begin with `# expects: check=NN.stage:check misconception=name`, not {first!r}"
    )
    return Expectation(match["stage"], match["check"], None if match["name"] == "-" else match["name"])


def namespace(path: Path) -> dict[str, Any]:
    """Return what a submission defines."""
    space: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), space)
    return space


@functools.cache
def report(path: Path, stage_id: str, tier: str = "all") -> StageReport:
    """Return the report of one submission on one stage."""
    return run_in_process(load_exercise(stage_id[:2]).stage(stage_id), namespace(path), tier=tier, seed=1)


def solution_code(exercise_id: str) -> dict[str, Any]:
    """Return what the solution of an exercise defines."""
    return graded_code("solutions", exercise_id)


def graded_code(kind: str, exercise_id: str) -> dict[str, Any]:
    """Return what the import cell and the graded cells of a notebook define; `kind` is its folder."""
    root = builder.find_root()
    (target,) = sources.targets(root, (f"{kind}/{exercise_id}",))
    space: dict[str, Any] = {"__name__": "notebook"}
    for cell in sources.prepare(target, root).cells:
        if cell.cell_type == "code" and (cell.metadata.get("grade") or _imports(cell.source)):
            name = str(cell.id)  # Triton reads the source of a kernel
            linecache.cache[name] = len(cell.source), None, cell.source.splitlines(True), name
            exec(compile(cell.source, name, "exec"), space)
    return space


def _imports(source: str) -> bool:
    return any(line.startswith(("import ", "from ")) for line in source.splitlines())
