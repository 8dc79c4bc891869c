"""Gaps in the docstrings and annotations of the reference package, read from its source without importing it.

Public here means: for examples, what `ringlab.__all__` and the packages' `__init__` export, commands excepted; for the
other three, every module-level function and every method of a module-level class without a leading underscore.

examples  exported functions and classes without a doctest in their docstring (a class: or in one of its methods);
          of an exported module, such as `ringlab.oracle`, its functions
methods   public methods without a docstring, of their own or of the method that they override
raises    public functions that raise, or whose private helpers do, and do not say `Raises:`
axes      public functions with an array parameter whose annotation states no axes (jaxtyping)
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
KINDS = ("examples", "methods", "raises", "axes")
Function = ast.FunctionDef | ast.AsyncFunctionDef
_ARRAYS = {"Tensor", "ndarray", "NDArray"}
_WITH_AXES = {"Float", "Int", "Int64", "Bool", "Num", "Shaped", "Inexact", "Complex", "UInt8", "Float32", "Float64", "Integer"}  # fmt: skip
_ALIASES = {"Query", "KeyValue", "RowState", "Travelling"}
"""Array types of `ringlab.types`, which state axes."""
_COMMANDS = "cli"
_NOT_ERRORS = ("NotImplementedError", "StopIteration", "typer.", "SystemExit")
"""Exceptions that no caller is meant to handle: abstract methods, iteration, and the ends of commands."""


@dataclass
class Source:
    """One module: its dotted name, file and parsed source."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """Its module-level classes."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Its module-level functions; of overloaded ones, the last."""
        return {node.name: node for node in self.tree.body if isinstance(node, Function)}


@dataclass
class Package:
    """All modules below one folder."""

    root: Path = CHECKOUT
    name: str = "ringlab"
    sources: dict[str, Source] = field(init=False)

    def __post_init__(self) -> None:
        self.sources = {}
        for path in sorted((self.root / self.name).rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.sources[module] = Source(module, path)


def missing(package: Package) -> dict[str, dict[str, list[str]]]:
    """Return, for each kind and folder, the full names of what lacks it."""
    found: dict[str, dict[str, list[str]]] = {kind: defaultdict(list) for kind in KINDS}
    for kind, source, name in _all_missing(package):
        found[kind][_folder(package, source)].append(f"{source.name}.{name}")
    return {kind: dict(folders) for kind, folders in found.items()}


def _all_missing(package: Package) -> Iterator[tuple[str, Source, str]]:
    for source, name, node in exported(package):
        if not _has_example(node):
            yield "examples", source, name
    for source in package.sources.values():
        for name, function, owner in public_functions(source):
            if owner is not None and not _documented(package, source, owner, function):
                yield "methods", source, name
            if _raises(source, function, owner) and not says_what_it_raises(function):
                yield "raises", source, name
            if _takes_bare_arrays(function):
                yield "axes", source, name


def _folder(package: Package, source: Source) -> str:
    parts = source.name.split(".")
    inside = len(parts) > 2 or (len(parts) == 2 and source.path.name == "__init__.py")
    return parts[1] if inside else package.name


def public_functions(source: Source) -> Iterator[tuple[str, Function, ast.ClassDef | None]]:
    """Yield (name, function, its class or None) of each public function and method."""
    for name, function in source.functions.items():
        if not name.startswith("_"):
            yield name, function, None
    for name, owner in source.classes.items():
        if name.startswith("_"):
            continue
        for child in owner.body:
            if isinstance(child, Function) and not child.name.startswith("_") and not _is_overload(child):
                yield f"{name}.{child.name}", child, owner


def exported(package: Package) -> Iterator[tuple[Source, str, Function | ast.ClassDef]]:
    """Yield (its module, name, definition) of each exported function and class, once."""
    seen = set()
    for init in (source for source in package.sources.values() if source.path.name == "__init__.py"):
        if init.name == f"{package.name}.{_COMMANDS}":
            continue
        for name, home in _exports(init).items():
            for source, real, node in _defined(package, home, name):
                if (source.name, real) not in seen:
                    seen.add((source.name, real))
                    yield source, real, node


def _defined(package: Package, home: str, name: str) -> Iterator[tuple[Source, str, Function | ast.ClassDef]]:
    """Return the definitions of an exported name: a function or a class, or all public functions of a module."""
    if module := package.sources.get(f"{home}.{name}"):
        yield from ((module, real, node) for real, node, owner in public_functions(module) if owner is None)
    elif source := package.sources.get(home):
        node = source.functions.get(name) or source.classes.get(name)
        if node is not None:
            yield source, name, node


def _exports(init: Source) -> dict[str, str]:
    """The names that an `__init__` exports, each with the module that it is imported from."""
    listed = _listed(init.tree)
    found = {}
    for node in ast.walk(init.tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.asname == alias.name or alias.name in listed:
                    found[alias.name] = node.module or ""
    own = {*init.functions, *init.classes}
    found |= dict.fromkeys(own & listed if listed else own, init.name)
    return {name: home for name, home in found.items() if not name.startswith("_")}


def _listed(tree: ast.Module) -> set[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            constants = (n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant))
            return {value for value in constants if isinstance(value, str)}
    return set()


def _has_example(node: Function | ast.ClassDef) -> bool:
    nodes: list[Function | ast.ClassDef] = [node]
    if isinstance(node, ast.ClassDef):
        nodes += [child for child in node.body if isinstance(child, Function)]
    return any(">>> " in (ast.get_docstring(each) or "") for each in nodes)


def _documented(package: Package, source: Source, owner: ast.ClassDef, function: Function) -> bool:
    """Return whether a method has a docstring, or a class that it inherits from documents it."""
    if (
        ast.get_docstring(function)
        or {"overload", "override"} & _decorators(function)
        or _is_setter(function)
    ):
        return True
    inherited = (child for parent in _parents(package, source, owner) for child in parent.body)
    return any(
        isinstance(child, Function) and child.name == function.name and ast.get_docstring(child)
        for child in inherited
    )


def _parents(package: Package, source: Source, owner: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """All classes of the package that a class inherits from, nearest first."""
    imported = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for base in owner.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        home, real = imported.get(name, (source.name, name))
        parent_source = package.sources.get(home)
        if parent_source and real in parent_source.classes and parent_source.classes[real] is not owner:
            parent = parent_source.classes[real]
            yield parent
            yield from _parents(package, parent_source, parent)


def says_what_it_raises(function: Function) -> bool:
    """Return whether the docstring says `Raises:`."""
    return "Raises:" in (ast.get_docstring(function) or "")


def _raises(source: Source, function: Function, owner: ast.ClassDef | None) -> bool:
    """Return whether a function, or a private helper that it calls directly, raises something that callers may handle."""
    if _raises_itself(function):
        return True
    helpers = [source.functions.get(name) for name in _calls(function, "")]
    if owner is not None:
        methods = {child.name: child for child in owner.body if isinstance(child, Function)}
        helpers += [methods.get(name) for name in _calls(function, "self.") | _calls(function, "cls.")]
    return any(_raises_itself(helper) for helper in helpers if helper is not None)


def _raises_itself(function: Function) -> bool:
    return any(
        isinstance(node, ast.Raise)
        and node.exc is not None
        and not ast.unparse(node.exc).startswith(_NOT_ERRORS)
        for node in ast.walk(function)
    )


def _calls(function: Function, prefix: str) -> set[str]:
    """The private names that a function calls as `prefix` + name."""
    called = (ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call))
    names = (text.removeprefix(prefix) for text in called if text.startswith(prefix))
    return {name for name in names if name.startswith("_") and name.isidentifier()}


def _takes_bare_arrays(function: Function) -> bool:
    arguments = function.args
    every = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    return any(_bare(each.annotation) for each in every if each is not None and each.annotation is not None)


def _bare(annotation: ast.expr) -> bool:
    """Return whether an annotation names an array without axes around it."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _bare(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.Subscript) and _last(annotation.value) in _WITH_AXES:
        return False
    if _last(annotation) in _ALIASES:
        return False
    if _last(annotation) in _ARRAYS:
        return True
    return any(_bare(child) for child in ast.iter_child_nodes(annotation) if isinstance(child, ast.expr))


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _decorators(function: Function) -> set[str]:
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in function.decorator_list}


def _is_overload(function: Function) -> bool:
    return "overload" in _decorators(function)


def _is_setter(function: Function) -> bool:
    return bool({"setter", "deleter"} & _decorators(function))
