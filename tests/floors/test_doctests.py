"""Every example in a docstring of the reference package runs, prints what it says, and is quick."""

from __future__ import annotations

import ast
import doctest
import importlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.house.imports import CHECKOUT

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
    """Yield (name, docstring) of a module and of all that it defines.

    They are read, not taken from the imported module: while tests run, functions are wrapped for the shape checks, and
    doctest would overlook them.
    """
    inside: list[tuple[str, ast.AST]] = [("module", ast.parse(source))]
    for prefix, node in inside:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix, ast.get_docstring(node) or ""
        for child in ast.iter_child_nodes(node):
            inside.append((getattr(child, "name", prefix), child))


def failures(module: str, name: str, docstring: str) -> str:
    """Run the examples of a docstring; return what doctest reports about those that fail."""
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


def test_a_wrong_example_is_caught() -> None:
    assert "Expected:" in failures("ringlab.errors", "made_up", ">>> 1 + 1\n3\n")
    assert "NameError" in failures("ringlab.errors", "made_up", ">>> nonesuch\n3\n")
