"""Imports between the modules of both packages: which point up, and which form circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from .floors import floor_of

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = ("ringlab", "ringlab_course")


def modules(root: Path = CHECKOUT) -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of every module of both packages, except the two facades, which import at first use only."""
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name not in PACKAGES and not _is_data(path):
            yield name, path


def imports(module: str, source: str, *, is_package: bool = False) -> Iterator[tuple[int, str, str]]:
    """Yield (line, module, name) of each import of our own modules, also inside functions and under TYPE_CHECKING.

    `name` is what is taken from the module, "" for a plain `import`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names if _is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            if base in PACKAGES:
                yield from ((node.lineno, f"{base}.{alias.name}", "") for alias in node.names)
            elif _is_ours(base):
                yield from ((node.lineno, base, alias.name) for alias in node.names)


def upward(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Return a line for each import that points to a higher floor than the module's own."""
    own = floor_of(module)
    lines = {
        (line, name): f"{module}:{line}: floor {own} imports {name} from floor {floor_of(name)}"
        for line, name, _ in imports(module, source, is_package=is_package)
        if floor_of(name) > own
    }
    return list(lines.values())


def all_upward(root: Path = CHECKOUT) -> list[str]:
    """Return a line for each upward import of the tree at `root`."""
    return [
        line
        for module, path in modules(root)
        for line in upward(module, path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py")
    ]


def circles(root: Path = CHECKOUT) -> list[list[str]]:
    """Return the circles of imports, each as the sorted modules that import each other, directly or not."""
    return strongly_connected(graph(root))


def graph(root: Path = CHECKOUT) -> dict[str, set[str]]:
    """Return for every module those that it imports."""
    known = dict(modules(root))
    found: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        text, is_package = path.read_text(encoding="utf-8"), path.name == "__init__.py"
        for _, base, taken in imports(name, text, is_package=is_package):
            target = f"{base}.{taken}" if f"{base}.{taken}" in known else base
            while target not in known and "." in target:
                target = target.rpartition(".")[0]
            if target in known and target != name:
                found[name].add(target)
    return found


def strongly_connected(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of two or more nodes in which each reaches every other (Tarjan)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], index[other])
        if lowest[node] == index[node]:
            cut = stack.index(node)
            group = stack[cut:]
            del stack[cut:]
            if len(group) > 1:
                groups.append(sorted(group))

    for node in edges:
        if node not in index:
            visit(node)
    return sorted(groups)


def _is_data(path: Path) -> bool:
    """Return whether a file is a notebook's source or a learner's answer, which nothing imports."""
    return path.name == "exercise.py" or path.parent.name in ("lessons", "right")


def _is_ours(name: str) -> bool:
    return name.startswith(tuple(f"{package}." for package in PACKAGES))


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parents = module.split(".")
    drop = node.level - 1 if is_package else node.level
    return ".".join([*parents[: len(parents) - drop], *([node.module] if node.module else [])])
