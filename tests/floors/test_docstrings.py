"""Exported names have examples that run, methods have docstrings, functions have `Raises:` and axis types.

`make house` lists the names that lack any of these.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.house import docstrings
from tools.house.docstrings import CHECKOUT, KINDS

PACKAGE = docstrings.read()
MISSING = docstrings.missing(PACKAGE)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_missing(kind: str) -> None:
    assert MISSING[kind] == []


def test_the_package_was_read() -> None:
    names = {name.rpartition(".")[2] for name, _ in docstrings.exported(PACKAGE)}
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
        sum(1 for module in PACKAGE.modules.values() for _ in docstrings.public_functions(module.tree)) > 800
    )


PATIENCE = 20.0
"""Seconds of processor time; an example takes one at most."""


def examples(root: Path = CHECKOUT / "ringlab") -> Iterator[tuple[str, str, str]]:
    """Yield (module, name, docstring) of each docstring with an example."""
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if ">>> " in text:
            parts = path.relative_to(root.parent).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield from ((module, name, said) for name, said in documented(text) if ">>> " in said)


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


CASES = [
    pytest.param(*case, id=f"{case[0]}.{case[1]}", marks=[pytest.mark.needs_triton] * ("triton" in case[0]))
    for case in examples()
]


@pytest.mark.parametrize("module, name, docstring", CASES)
def test_an_example_prints_what_it_says(module: str, name: str, docstring: str) -> None:
    begin = time.process_time()
    assert failures(module, name, docstring) == ""
    assert time.process_time() - begin < PATIENCE


def test_no_example_is_overlooked() -> None:
    written = sum(
        path.read_text(encoding="utf-8").count(">>> ") for path in (CHECKOUT / "ringlab").rglob("*.py")
    )
    assert sum(docstring.count(">>> ") for _, _, docstring in examples()) == written >= 5
