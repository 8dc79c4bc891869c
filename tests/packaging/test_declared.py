"""What the code imports, pyproject.toml declares."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
# Rooms in which a teacher works, and the extra of each; a learner who never enters them needs none of its packages.
INSTRUCTORS_ROOMS = {
    "ringlab/conformance/peers/": "peers",
    "ringlab/conformance/plugin.py": "test",  # pytest itself loads it
    "ringlab/course/execution.py": "instructor",
    "ringlab/course/gradebook/": "instructor",
    "ringlab/course/gradebook/cluster.py": "cluster",
    "ringlab/course/mesh/": "jax",
    "ringlab/course/nbgrader/": "nbgrader",
    "ringlab/hf/": "hf",
    "ringlab/lab/": "instructor",
}
EXTRAS_OF_LESSONS = dict.fromkeys(("src/lessons/17_ring_in_jax.py", "src/exercises/17_ring_in_jax.py"), "jax")
"""Notebooks that ask for an extra before they import of it."""
OWN = {"ringlab", "tests", "tools"}
OWNERS = importlib.metadata.packages_distributions()


def declared(*extras: str) -> set[str]:
    """Return the distributions that an install with `extras` brings by name."""
    texts = [
        *PROJECT["dependencies"],
        *(text for e in extras for text in PROJECT["optional-dependencies"][e]),
    ]
    return {canonicalize_name(Requirement(text).name) for text in texts}


def imported(source: str) -> set[str]:
    """Return the top-level third-party modules that `source` imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found - set(sys.stdlib_module_names) - OWN


def undeclared(name: str, source: str, allowed: set[str]) -> list[str]:
    """Return a line for each import of `source` whose distribution is not `allowed`."""
    return [
        f"{name} imports {module}"
        for module in sorted(imported(source))
        if not {canonicalize_name(owner) for owner in OWNERS.get(module, [])} & allowed
    ]


def test_the_package_imports_what_is_declared() -> None:
    found = []
    for path in sorted((CHECKOUT / "ringlab").rglob("*.py")):
        name = path.relative_to(CHECKOUT).as_posix()
        extras = [extra for room, extra in INSTRUCTORS_ROOMS.items() if name.startswith(room)]
        found += undeclared(name, path.read_text(), declared(*extras))
    assert found == []


def test_the_lessons_import_what_learners_have() -> None:
    found = []
    for path in sorted((CHECKOUT / "src").rglob("*.py")):
        name, source = path.relative_to(CHECKOUT).as_posix(), path.read_text()
        extras = [EXTRAS_OF_LESSONS[name]] if name in EXTRAS_OF_LESSONS else []
        assert all(f'needs_extra("{extra}")' in source for extra in extras)
        found += undeclared(name, source, declared(*extras))
    assert found == []


def test_the_tests_import_what_is_declared() -> None:
    found = []
    for folder in ("tests", "tools"):
        for path in sorted((CHECKOUT / folder).rglob("*.py")):
            found += undeclared(
                path.relative_to(CHECKOUT).as_posix(),
                path.read_text(),
                declared("test", "instructor", "site"),
            )
    assert found == []


def test_an_undeclared_import_is_noticed() -> None:
    source = "import os\ndef late():\n    from sphinx import application\n    import numpy.linalg"
    assert undeclared("x.py", source, declared()) == ["x.py imports sphinx"]
