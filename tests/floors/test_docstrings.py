"""Exported names have examples that run, methods have docstrings, functions have `Raises:` and axis types.

`make house` lists the names that lack any of these.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import time
from collections.abc import Iterator

import pytest

from tools.house import docstrings
from tools.house.docstrings import CHECKOUT, KINDS


def test_nothing_is_missing() -> None:
    missing = docstrings.missing(docstrings.read())
    assert {kind: missing[kind] for kind in KINDS if missing[kind]} == {}


def test_the_package_was_read() -> None:
    package = docstrings.read()
    names = {name.rpartition(".")[2] for name, _ in docstrings.exported(package)}
    assert {
        "ring_attention",
        "zigzag",
        "Mask",
        "VirtualCluster",
        "TritonBlock",
        "train",
        "attention",
    } <= names
    assert (
        sum(1 for module in package.modules.values() for _ in docstrings.public_functions(module.tree)) > 800
    )


PATIENCE = 20.0
"""Seconds of processor time for the examples of one module; an example takes one at most."""

MODULES = {
    ".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__"): text
    for path in sorted((CHECKOUT / "ringlab").rglob("*.py"))
    if ">>> " in (text := path.read_text(encoding="utf-8"))
}
"""The text of each module with an example."""


def documented(source: str) -> Iterator[tuple[str, str]]:
    """Yield (name, docstring) of a module and of each of its classes and functions.

    The docstrings are parsed from the source, not from the imported module, because the shape checks wrap
    functions during tests and doctest would overlook wrapped functions.
    """
    inside: list[tuple[str, ast.AST]] = [("module", ast.parse(source))]
    for prefix, node in inside:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix, ast.get_docstring(node) or ""
        for child in ast.iter_child_nodes(node):
            inside.append((getattr(child, "name", prefix), child))


def failures(module: str, name: str, docstring: str) -> str:
    """Run the examples of a docstring; return the report of doctest about the examples that fail."""
    said: list[str] = []
    names = vars(importlib.import_module(module)).copy()
    test = doctest.DocTestParser().get_doctest(docstring, names, f"{module}.{name}", module, 0)
    doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)
    return "".join(said)


@pytest.mark.parametrize(
    "module", [pytest.param(each, marks=[pytest.mark.needs_triton] * ("triton" in each)) for each in MODULES]
)
def test_each_example_of_a_module_prints_what_it_says(module: str) -> None:
    begin = time.process_time()
    found = [(name, said) for name, said in documented(MODULES[module]) if ">>> " in said]
    assert sum(said.count(">>> ") for _, said in found) == MODULES[module].count(">>> ") > 0
    assert "".join(failures(module, name, said) for name, said in found) == ""
    assert time.process_time() - begin < PATIENCE
