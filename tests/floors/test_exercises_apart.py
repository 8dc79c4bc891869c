"""All of an exercise is in its folder: none imports from another one's. What they share is in checking."""

from __future__ import annotations

import pytest

from tools.house import imports

EXERCISES = "ringlab_course.exercises."
MODULES = {name: path for name, path in imports.modules() if name.startswith(EXERCISES)}


def of_others(module: str, source: str) -> list[str]:
    """Return the modules of other exercises that a module of an exercise imports."""
    own = folder(module)
    named = {f"{base}.{taken}" for _, base, taken in imports.imports(module, source)}
    return sorted(name for name in named if name.startswith(EXERCISES) and folder(name) != own)


def folder(module: str) -> str:
    return module.removeprefix(EXERCISES).partition(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_no_exercise_imports_another(module: str) -> None:
    assert of_others(module, MODULES[module].read_text(encoding="utf-8")) == []


def test_the_exercises_were_found() -> None:
    assert len({folder(module) for module in MODULES}) == 19


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
