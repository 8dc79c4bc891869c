"""Which module stands on which floor, and which imports point up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "ringlab"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "types"),
    ("oracle", "layout", "mask", "scores", "tile", "pieces", "plan", "merge"),
    ("blocks", "comm"),
    ("agreement", "schedules"),
    ("attention", "nn", "cost", "conformance"),
    ("viz", "course", "bench", "lab", "hf", "verify", "doctor", "cli", "__main__"),
)


def floor_of(module: str) -> int:
    """Return the floor of `ringlab.…`; a module that the table does not know has none."""
    room = module.removeprefix("ringlab.").split(".")[0]
    for number, rooms in enumerate(FLOORS):
        if room in rooms:
            return number
    raise LookupError(f"{module} stands on no floor: give {room!r} its place in {Path(__file__).name}")


def imports(module: str, source: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, imported ringlab module), also for imports inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if _ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            if base == "ringlab":
                yield from ((node.lineno, f"ringlab.{alias.name}") for alias in node.names)
            elif _ours(base):
                yield node.lineno, base


def upward(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Return a line for each import that points to a higher floor than the module's own."""
    own = floor_of(module)
    return [
        f"{module}:{line}: floor {own} imports {name} from floor {floor_of(name)}"
        for line, name in imports(module, source, is_package=is_package)
        if floor_of(name) > own
    ]


def modules() -> Iterator[tuple[str, Path]]:
    """Yield every module of the package but its facade, which imports at first use only."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name != "ringlab":
            yield name, path


def _ours(name: str) -> bool:
    return name.startswith("ringlab.")


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parents = module.split(".")
    drop = node.level - 1 if is_package else node.level
    return ".".join([*parents[: len(parents) - drop], *([node.module] if node.module else [])])
