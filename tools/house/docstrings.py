"""Gaps in the docstrings and annotations of the reference package, found in its source without an import.

There are four kinds of gaps. `examples` covers everything that `ringlab.__all__` and the packages' `__init__`
export, except commands. The other kinds cover every module-level function and every method of a module-level
class without a leading underscore.

examples  exported functions and classes whose docstring has no doctest (a class may have it in a method), and
          such functions of exported modules, such as `ringlab.oracle`
methods   public methods without a docstring, if the method that they override has no docstring either
raises    public functions that raise an error, themselves or in a private helper, without `Raises:`
axes      public functions with an array parameter whose annotation has no axes (jaxtyping)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..website.api import Module, exports

CHECKOUT = Path(__file__).resolve().parents[2]
KINDS = ("examples", "methods", "raises", "axes")
Function = ast.FunctionDef | ast.AsyncFunctionDef
_NOT_ERRORS = ("NotImplementedError", "StopIteration", "typer.", "SystemExit")
"""Exceptions that no caller is meant to handle: abstract methods, iteration, and the ends of commands."""
_WITH_AXES = re.compile(
    r"\b(?:Float|Int|Bool|Num|Shaped|Inexact|Complex|UInt8|Integer)\w*\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]"
)
_ARRAY = re.compile(r"\b(?:Tensor|ndarray|NDArray)\b")


class Package(NamedTuple):
    """All modules below one folder, by name, and the names of those modules that are packages."""

    modules: dict[str, Module]
    packages: list[str]


def read(root: Path = CHECKOUT, name: str = "ringlab") -> Package:
    """Return the package called `name` below `root`."""
    modules, packages = {}, []
    for path in sorted((root / name).rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        modules[module] = Module(module, ast.parse(path.read_text(encoding="utf-8")))
        packages += [module] if path.name == "__init__.py" else []
    return Package(modules, packages)


def missing(package: Package) -> dict[str, list[str]]:
    """Return, for each kind of gap, the full names that have it."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    found["examples"] = [name for name, node in exported(package) if not _has_example(node)]
    inherited = _documented_methods(package)
    for module in package.modules.values():
        for name, function, owner in public_functions(module.tree):
            full = f"{module.name}.{name}"
            if owner is not None and not _is_documented(function, owner.name, inherited):
                found["methods"].append(full)
            if _raises(module.tree, function, owner) and "Raises:" not in (ast.get_docstring(function) or ""):
                found["raises"].append(full)
            if any(_ARRAY.search(_WITH_AXES.sub("", each)) for each in _annotations(function)):
                found["axes"].append(full)
    return found


def public_functions(tree: ast.Module) -> Iterator[tuple[str, Function, ast.ClassDef | None]]:
    """Yield (name, function, its class or None) for each public function and method.

    Of overloaded functions, only the last definition is yielded.
    """
    for name, function in _functions(tree).items():
        if not name.startswith("_"):
            yield name, function, None
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef) and not owner.name.startswith("_"):
            for name, function in _functions(owner).items():
                if not name.startswith("_"):
                    yield f"{owner.name}.{name}", function, owner


def exported(package: Package) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Yield (full name, definition) for each exported function and class, without repetitions."""
    found: dict[str, Function | ast.ClassDef] = {}
    for name in package.packages:
        init = package.modules[name]
        names = {} if name == "ringlab.cli" else dict.fromkeys(_definitions(init.tree), name) | exports(init)
        for each, home in names.items():
            if whole := package.modules.get(f"{home}.{each}"):
                functions = {
                    n: node for n, node in _definitions(whole.tree).items() if isinstance(node, Function)
                }
                found |= {f"{whole.name}.{n}": node for n, node in functions.items()}
            elif home in package.modules and each in (there := _definitions(package.modules[home].tree)):
                found[f"{home}.{each}"] = there[each]
    yield from found.items()


def _functions(node: ast.Module | ast.ClassDef) -> dict[str, Function]:
    return {child.name: child for child in node.body if isinstance(child, Function)}


def _definitions(tree: ast.Module) -> dict[str, Function | ast.ClassDef]:
    """Return the public functions and classes of a module, by name."""
    kinds = Function | ast.ClassDef
    return {n.name: n for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")}


def _has_example(node: Function | ast.ClassDef) -> bool:
    nodes = [node, *(_functions(node).values() if isinstance(node, ast.ClassDef) else ())]
    return any(">>> " in (ast.get_docstring(each) or "") for each in nodes)


def _documented_methods(package: Package) -> dict[str, set[str]]:
    """Return, by class name, the methods with a docstring, including those of base classes."""
    classes = {
        node.name: node
        for m in package.modules.values()
        for node in m.tree.body
        if isinstance(node, ast.ClassDef)
    }

    def documented(name: str) -> set[str]:
        if name not in classes:
            return set()
        own = {each for each, function in _functions(classes[name]).items() if ast.get_docstring(function)}
        bases = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in classes[name].bases)
        return own.union(*(documented(base) for base in bases if base != name))

    return {name: documented(name) for name in classes}


def _is_documented(function: Function, owner: str, inherited: dict[str, set[str]]) -> bool:
    setters = (
        ast.unparse(each).rpartition(".")[2] in ("setter", "deleter") for each in function.decorator_list
    )
    return bool(ast.get_docstring(function)) or function.name in inherited[owner] or any(setters)


def _raises(tree: ast.Module, function: Function, owner: ast.ClassDef | None) -> bool:
    """Return whether a function raises an error that callers may handle.

    Private helpers that the function calls directly are included.
    """
    called = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    helpers = {name: helper for name, helper in _functions(tree).items() if name.startswith("_")}
    for name, method in _functions(owner).items() if owner else ():
        helpers |= {f"{self}.{name}": method for self in ("self", "cls") if name.startswith("_")}
    return any(
        map(_raises_itself, [function, *(helper for name, helper in helpers.items() if name in called)])
    )


def _raises_itself(function: Function) -> bool:
    raised = (node.exc for node in ast.walk(function) if isinstance(node, ast.Raise))
    return any(exc is not None and not ast.unparse(exc).startswith(_NOT_ERRORS) for exc in raised)


def _annotations(function: Function) -> Iterator[str]:
    """Yield the annotations of a function's parameters, without quotes around string annotations."""
    for node in ast.walk(function.args):
        if isinstance(node, ast.arg) and node.annotation is not None:
            text = node.annotation
            whole = isinstance(text, ast.Constant) and isinstance(text.value, str)
            yield str(text.value) if whole else ast.unparse(text)  # type: ignore[attr-defined]
