"""Every imported package is in pyproject.toml: the reference's as a dependency, all others in extras."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ringlab.blocks.flash import VERSIONS
from tests.packaging.test_drift import FOR_GPUS

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
EXTRAS_OF = {
    "ringlab/bench/draw.py": "figures",
    "ringlab/cli/doctor.py": "figures",
    "ringlab/conformance/plugin.py": "test",  # pytest itself loads it
    "ringlab/hf/": "hf",
    "ringlab/viz/": "lab",
    "ringlab_course/": "lab",
    "ringlab_course/builder/execution.py": "instructor",
    "ringlab_course/exercises/e17_ring_in_jax/": "jax",
    "ringlab_course/gradebook/": "instructor",
    "ringlab_course/gradebook/cluster.py": "cluster",
    "ringlab_course/lab/": "instructor",
    "ringlab_course/lessons/17_ring_in_jax.py": "jax",
    "ringlab_course/mesh/": "jax",
    "ringlab_course/nbgrader/": "nbgrader",
}
"""Folders and files that need more than the base install, and the extra that has it."""
ASK_FIRST = (
    "ringlab_course/exercises/e17_ring_in_jax/exercise.py",
    "ringlab_course/lessons/17_ring_in_jax.py",
)
"""Notebooks that ask for [jax] before they import it."""
OWN = {"ringlab", "ringlab_course", "tests", "tools"}
OWNERS = importlib.metadata.packages_distributions()


@cache
def declared(*extras: str) -> frozenset[str]:
    """Return the names of the distributions that `extras`, and the extras that they include, install."""
    requirements = [Requirement(text) for text in PROJECT["dependencies"]]
    for extra in extras:
        requirements += [Requirement(text) for text in PROJECT["optional-dependencies"][extra]]
    included = [
        each for requirement in requirements if requirement.name == "ringlab" for each in requirement.extras
    ]
    names = {canonicalize_name(requirement.name) for requirement in requirements} - {"ringlab"}
    return frozenset(names.union(*(declared(extra) for extra in included)))


def imported(source: str) -> set[str]:
    """Return the top-level modules that `source` imports anywhere, without Python's own modules."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found - set(sys.stdlib_module_names)


def undeclared(name: str, source: str, allowed: frozenset[str]) -> list[str]:
    """Return a line for each import of `source` whose distribution is not `allowed`."""
    return [
        f"{name} imports {module}"
        for module in sorted(imported(source) - OWN)
        if not {canonicalize_name(owner) for owner in OWNERS.get(module, [])} & allowed
    ]


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every Python file in folders of the checkout."""
    for folder in folders:
        for path in sorted((CHECKOUT / folder).rglob("*.py")):
            yield path.relative_to(CHECKOUT).as_posix(), path.read_text()


def extras_of(name: str) -> set[str]:
    return {extra for place, extra in EXTRAS_OF.items() if name.startswith(place)}


@pytest.mark.parametrize("package", ["ringlab", "ringlab_course"])
def test_a_package_imports_what_is_declared(package: str) -> None:
    found = []
    for name, source in sources(package):
        found += undeclared(name, source, declared(*sorted(extras_of(name))))
    assert found == []


@pytest.mark.parametrize("name", ASK_FIRST)
def test_a_notebook_asks_for_an_extra_before_it_imports_of_it(name: str) -> None:
    assert 'needs_extra("jax")' in (CHECKOUT / name).read_text().split("import jax")[0]


def asked_for(source: str) -> Iterator[tuple[str, str]]:
    """Yield (package, extra) for each call of require_package, and of `optional`, with literal names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require_package":
            package, extra, _ = node.args
            if isinstance(package, ast.Constant) and isinstance(extra, ast.Constant):
                yield package.value, extra.value
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "optional":
                    assert isinstance(key, ast.Constant) and isinstance(value.args[0], ast.Constant)
                    yield key.value, value.args[0].value


def test_an_error_names_an_extra_that_brings_the_package() -> None:
    asked = {pair for _, source in sources("ringlab", "ringlab_course") for pair in asked_for(source)}
    assert {"figures", "lab", "hf", "jax", "instructor", "cluster", "nbgrader"} == {
        extra for _, extra in asked
    }
    for package, extra in asked:
        assert {canonicalize_name(owner) for owner in OWNERS[package]} & (declared(extra) - declared())


def test_the_tests_import_what_is_declared() -> None:
    found = []
    for name, source in sources("tests", "tools"):
        found += undeclared(name, source, declared("test", "site"))
    assert found == []


def test_the_developers_install_has_every_extra() -> None:
    """The developers' install, as `make test` makes it, has every extra but those that need CUDA."""
    assert declared("test", "site") == declared(*PROJECT["optional-dependencies"].keys() - FOR_GPUS)


def test_an_error_names_the_extra_of_each_version_of_flash_attn() -> None:
    named = {
        block.name: extra
        for block in VERSIONS
        for extra in re.findall(r"pip install .*'ringlab\[(\w+)\]'", block.package)
    }
    brought = {name: declared(extra) - declared() for name, extra in named.items()}
    assert brought == {"flash-2": {"flash-attn"}, "flash-4": {"flash-attn-4"}}
    assert {*named.values()} == FOR_GPUS
