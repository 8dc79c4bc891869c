"""Cells in IPython's syntax: Python, and lines that only a notebook understands, such as %timeit and !ls.

Such a line becomes a call of `get_ipython()`. At the top level of a cell, the call is left out. Inside a loop
or a function, `NoShell` answers the call; it replaces IPython in a worker and does nothing.
"""

from __future__ import annotations

import ast
import re
from typing import Any

_COMMAND = re.compile(
    r"(?P<head>\s*(?:[\w.,\s\[\]*()]+=\s*)?)(?:[%!].*|\?{1,2}[\w.*%]+\s*|[\w.*%\[\]]+\?{1,2}\s*)"
)
_STILL_PYTHON = ("%%time", "%%capture")
"""Magics of a whole cell that leave the cell's names in the notebook."""


class NoShell:
    """Replaces IPython's shell in a worker; its magics and commands do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def getoutput(self, *_: Any, **__: Any) -> list[str]:
        """Return no lines, because the command was not run."""
        return []


def get_ipython() -> NoShell:
    """Return the object that replaces IPython's shell."""
    return NoShell()


def display(*_: Any, **__: Any) -> None:
    """Show nothing, because nobody watches a worker."""


def parsed(source: str) -> tuple[ast.Module, list[int]]:
    """Return the code of a cell, and the numbers of the top-level lines that were left out.

    Raises: SyntaxError for a cell that is still not Python without these lines, or belongs to another
    language.
    """
    source = _without_cell_magic(source)
    left_out = [1 + source[: source.find("\0")].count("\n")] if "\0" in source else []
    tree = _parse(source.replace("\0", ""))
    kept = [node for node in tree.body if not _is_command(node)]
    left_out += [node.lineno for node in tree.body if _is_command(node)]
    tree.body = kept
    return tree, left_out


def has_commands(source: str) -> bool:
    """Return whether a line of the cell begins like a magic or a shell command."""
    return any(line.lstrip().startswith(("%", "!")) for line in source.split("\n"))


def _parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError:
        pass
    try:
        return ast.parse(_line_by_line(source))
    except SyntaxError as error:
        try:
            return ast.parse(_by_ipython(source))
        except (ImportError, SyntaxError):
            raise error from None


def _line_by_line(source: str) -> str:
    """Return the cell with calls in place of its commands.

    A line is replaced only if Python's parser fails there, because a line that begins with % may continue an
    expression. Raises: SyntaxError for a line that is neither Python nor a command.
    """
    lines = source.split("\n")
    while True:
        text = "\n".join(lines)
        try:
            ast.parse(text)
            return text
        except SyntaxError as error:
            number = error.lineno or 0
            found = _COMMAND.fullmatch(lines[number - 1]) if 0 < number <= len(lines) else None
            if not found or (number > 1 and lines[number - 2].endswith("\\")):
                raise
            lines[number - 1] = f"{found['head']}get_ipython().getoutput()"


def _by_ipython(source: str) -> str:
    """Return the cell as IPython passes it to Python, without prompts and common indentation."""
    from IPython.core.inputtransformer2 import TransformerManager

    blank = len(source) - len(source.lstrip("\n"))
    return "\n" * blank + TransformerManager().transform_cell(source)


def _without_cell_magic(source: str) -> str:
    """Return the cell with the magic in its first line, if any, replaced by a null character.

    Raises: SyntaxError for a cell of another language.
    """
    if "\0" in source:
        raise SyntaxError("a null character")
    lines = source.split("\n")
    first = next((number for number, line in enumerate(lines) if line.strip()), 0)
    if not lines[first].startswith("%%"):
        return source
    if lines[first].split()[0] not in _STILL_PYTHON:
        raise SyntaxError("a cell of another language")
    lines[first] = "\0"
    return "\n".join(lines)


def _is_command(node: ast.stmt) -> bool:
    """Return whether a statement is only a call of get_ipython()."""
    part: Any = node.value if isinstance(node, ast.Expr) else None
    while isinstance(part, (ast.Call, ast.Attribute)):
        part = part.func if isinstance(part, ast.Call) else part.value
    return isinstance(part, ast.Name) and part.id == "get_ipython"
