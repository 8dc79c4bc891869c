"""The page of errors: the texts of all of ringlab's errors, read from the code that raises them.

A reader pastes an error's text into the search. An ellipsis replaces each value that is known only at run
time.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ringlab import errors

from .links import escape, table

TEXT = Path(__file__).parent / "text" / "errors.md"
NAME = "errors"
FILLED = "…"
_WORD = re.compile(r"[a-z]{2}")
Named = dict[str, ast.expr]


class Message(NamedTuple):
    """The texts of one place that raises an error."""

    error: str
    needed: str
    got: str
    remedy: str
    module: str


@cache
def messages(root: Path) -> list[Message]:
    """Return the messages in the package `ringlab` of the checkout at `root`, without repetitions."""
    found: dict[Message, None] = {}
    for path in sorted((root / "ringlab").rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found.update(dict.fromkeys(_raised(tree, module.removesuffix(".__init__"), _named(tree))))
    return list(found)


def _raised(tree: ast.Module, module: str, named: Named) -> Iterator[Message]:
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute):
            continue
        name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
        if name not in _classes():
            continue
        said = dict(zip(("needed", "got", "remedy"), call.args, strict=False))
        said |= {word.arg: word.value for word in call.keywords if word.arg}
        needed, got, remedy = (_text(said.get(part), named) for part in ("needed", "got", "remedy"))
        if needed.strip(FILLED + " "):
            yield Message(name, needed, got if _WORD.search(got) else "", remedy, module)


def _named(tree: ast.Module) -> Named:
    """Return the values that a module assigns to names, for names that are assigned once."""
    given: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            given.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in given.items() if len(values) == 1}


@cache
def _classes() -> dict[str, type[errors.RinglabError]]:
    known = inspect.getmembers(errors, inspect.isclass)
    return {name: each for name, each in known if issubclass(each, errors.RinglabError)}


def _text(node: ast.expr | None, named: Named) -> str:
    """Return a text as it is in the code, with an ellipsis for parts that are known only at run time."""
    if node is None:
        return ""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, named) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, named) + _text(node.right, named)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, named) if isinstance(node.value, ast.Name) else FILLED
    if isinstance(node, ast.IfExp):
        either = (_text(part, named) for part in (node.body, node.orelse))
        return " / ".join(filter(_WORD.search, either)) or FILLED
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
        parts = node.args[0].elts if isinstance(node.args[0], ast.List) else []
        return " ".join(_text(part, named) for part in parts) or FILLED
    if isinstance(node, ast.Name) and isinstance(
        named.get(node.id), ast.Constant | ast.JoinedStr | ast.IfExp
    ):
        return _text(named[node.id], {})
    return FILLED


def page(root: Path) -> str:
    """Return the page of errors."""
    said = messages(root)
    parts = []
    for name, each in _classes().items():
        rows = [
            (*map(escape, (message.needed, message.got, message.remedy)), f"`{message.module}`")
            for message in said
            if message.error == name
        ]
        if rows:
            about = inspect.getdoc(each) or ""
            parts.append(
                f"## {name}\n\n{about}\n\n{table(('needed', 'got', 'remedy', 'raised in'), sorted(rows))}"
            )
    return TEXT.read_text(encoding="utf-8") + "\n" + "\n\n".join(parts) + "\n"
