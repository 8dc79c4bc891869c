"""Imports point down only, and never in a circle.

All of an exercise is in its folder: none imports from another one's. What they share is in checking.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ringlab_course.catalogue import CAPSTONE, LESSONS
from tools.house import imports
from tools.house.floors import FLOORS

MODULES = dict(imports.modules())


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    path = MODULES[module]
    assert imports.upward(module, path.read_text(), is_package=path.name == "__init__.py") == []


def test_the_package_was_found() -> None:
    assert {"ringlab.errors", "ringlab.oracle", "ringlab.comm.ring", "ringlab.blocks"} <= MODULES.keys()


def test_the_table_lists_nothing_that_is_gone() -> None:
    listed = [room for _, rooms in FLOORS for room in rooms]
    assert len(listed) == len(set(listed))
    assert [room for room in listed if room not in MODULES] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ringlab.errors", "import ringlab.layout"),
        ("ringlab.merge", "from ringlab.blocks.naive import Naive"),
        ("ringlab.plan", "def late():\n    from ringlab.comm import ring"),
        ("ringlab.oracle", "if TYPE_CHECKING:\n    from ringlab.cli import main"),
        ("ringlab.blocks.naive", "from ringlab import attention"),
        ("ringlab.comm.ring", "from ..schedules import ring"),
        ("ringlab.comm.ring", "from .. import viz"),
        ("ringlab.conformance.tolerance", "from ringlab.viz import gantt"),
        ("ringlab.viz.gantt", "from ringlab_course.notebook import predictions"),
    ],
)
def test_an_upward_import_is_caught(module: str, source: str) -> None:
    assert len(imports.upward(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ringlab.plan", "from ringlab.layout import Layout"),
        ("ringlab.comm.ring", "from . import trace\nfrom ..errors import CommError"),
        ("ringlab.cli", "from ringlab import attention, oracle\nimport torch"),
    ],
)
def test_a_downward_import_passes(module: str, source: str) -> None:
    assert imports.upward(module, source) == []


def test_a_module_without_a_floor_is_caught() -> None:
    with pytest.raises(LookupError, match="stands on no floor"):
        imports.upward("ringlab.utils", "import math")


def test_there_are_no_circles() -> None:
    assert imports.circles() == []


CHAIN = {
    "a": "from ringlab.b import x",
    "b": "import ringlab.c",
    "c": "def late():\n    from ringlab import a",
}


@pytest.mark.parametrize(
    "changed, circles", [({}, 1), ({"c": "import math"}, 0), ({"b": "import ringlab.a"}, 1)]
)
def test_a_circle_is_found(tmp_path: Path, changed: dict[str, str], circles: int) -> None:
    (tmp_path / "ringlab").mkdir()
    for name, source in {**CHAIN, **changed}.items():
        (tmp_path / "ringlab" / f"{name}.py").write_text(source)
    found = imports.circles(tmp_path)
    assert len(found) == circles
    assert circles == 0 or {"ringlab.a", "ringlab.b"} <= set(found[0])


def test_the_oracle_stands_on_numpy_alone() -> None:
    allowed = {"__future__", "collections", "math", "typing", "numpy", "jaxtyping", "ringlab"}
    tree = ast.parse(Path(MODULES["ringlab.oracle"]).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= allowed
    assert {name for name in names if name.startswith("ringlab")} <= {"ringlab.errors"}


EXERCISES = "ringlab_course.exercises."
IN_EXERCISES = {name: path for name, path in imports.modules() if name.startswith(EXERCISES)}


def of_others(module: str, source: str) -> list[str]:
    """Return the modules of other exercises that a module of an exercise imports."""
    own = folder(module)
    named = {f"{base}.{taken}" for _, base, taken in imports.imports(module, source)}
    return sorted(name for name in named if name.startswith(EXERCISES) and folder(name) != own)


def folder(module: str) -> str:
    return module.removeprefix(EXERCISES).partition(".")[0]


@pytest.mark.parametrize("module", IN_EXERCISES)
def test_no_exercise_imports_another(module: str) -> None:
    assert of_others(module, IN_EXERCISES[module].read_text(encoding="utf-8")) == []


def test_the_exercises_were_found() -> None:
    assert {folder(module) for module in IN_EXERCISES} == {f"e{each.slug}" for each in (*LESSONS, CAPSTONE)}


@pytest.mark.parametrize(
    "source",
    [
        "from ringlab_course.exercises.e05_emulated_ring.ring import STAGE",
        "from ringlab_course.exercises.e05_emulated_ring import ring",
        "from ringlab_course.exercises import e05_emulated_ring",
        "import ringlab_course.exercises.e05_emulated_ring.ring as ring",
        "def late():\n    from ..e05_emulated_ring import ring",
    ],
)
def test_an_import_of_another_exercise_is_noticed(source: str) -> None:
    assert len(of_others(f"{EXERCISES}e06_what_it_costs.overlap", source)) == 1
    assert of_others(f"{EXERCISES}e05_emulated_ring.step", source) == []
