"""Imports form no circle; an exercise imports only from its own folder and below, and nothing but tests imports tests."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from ringlab_course.catalogue import COURSE

pytestmark = pytest.mark.thorough

EXERCISES = "ringlab_course.exercises"
FOLDERS = [f"e{each.slug}" for each in COURSE]
BELOW = ("catalogue", "checking", "mesh", "judge", "clinic", "errata", "figures")
"""The parts of the course from which an exercise may import."""
CHECKOUT = Path(__file__).resolve().parents[2]


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Return a circle of modules that import each other, or [] if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_form_no_circle() -> None:
    """The modules' imports form no circle; the two facades, which import on first use, are left out."""
    graph = grimp.build_graph("ringlab", "ringlab_course", cache_dir=None)
    modules = graph.modules - {"ringlab", "ringlab_course"}
    assert len(modules) > 300
    edges = {module: graph.find_modules_directly_imported_by(module) & modules for module in modules}
    assert circle(edges) == []
    assert circle({**edges, "ringlab.errors": {"ringlab.cli"}}) != []


def imported(folder: str, source: str) -> set[str]:
    """Return the course modules that a module in an exercise's folder imports, with absolute names."""
    own, found = f"{EXERCISES}.{folder}", set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = own.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("ringlab_course.")}


def strangers(folder: str, source: str) -> list[str]:
    """Return the imports from another exercise or from a higher folder."""
    allowed = (f"{EXERCISES}.{folder}.", *(f"ringlab_course.{room}." for room in BELOW))
    return [name for name in sorted(imported(folder, source)) if not f"{name}.".startswith(allowed)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_exercise_imports_its_own_folder_and_what_is_below(folder: str) -> None:
    modules = [
        each
        for each in (CHECKOUT / EXERCISES.replace(".", "/") / folder).glob("*.py")
        if each.name != "exercise.py"
    ]
    assert modules
    for module in modules:
        assert strangers(folder, module.read_text(encoding="utf-8")) == [], module.name


def imports_tests(source: str) -> bool:
    """Return whether a module imports `tests`, or a part of it, anywhere."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        if any(name.partition(".")[0] == "tests" for name in names):
            return True
    return False


def test_only_tests_import_tests() -> None:
    modules = [
        path for room in ("ringlab", "ringlab_course", "tools") for path in (CHECKOUT / room).rglob("*.py")
    ]
    assert len(modules) > 300
    assert [path for path in modules if imports_tests(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from tests.needs import chromium_path", True),
        ("def f():\n    import tests.needs as needs", True),
        ("from tests import needs", True),
        ("from .tests import values", False),
        ("import tests_of_speed", False),
    ],
)
def test_an_import_of_tests_is_found(source: str, found: bool) -> None:
    assert imports_tests(source) is found
