"""Cells as IPython reads them: Python, and lines that only a notebook understands, such as %timeit, !ls and np.exp?.

Such a line becomes a call of `get_ipython()`. At the top of a cell it is left out; inside a loop or a function
`NoShell`, which stands for IPython in a worker, answers it with nothing.
"""

from __future__ import annotations

import ast
import re
from typing import Any

_COMMAND = re.compile(
    r"(?P<head>\s*(?:[\w.,\s\[\]*()]+=\s*)?)(?:[%!].*|\?{1,2}[\w.*%]+\s*|[\w.*%\[\]]+\?{1,2}\s*)"
)
_STILL_PYTHON = ("%%time", "%%capture")
"""Magics of a whole cell that leave its names in the notebook."""


class NoShell:
    """In place of IPython's shell, where there is none: its magics and commands do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def getoutput(self, *_: Any, **__: Any) -> list[str]:
        """Return the lines that a command printed: it did not run."""
        return []


def get_ipython() -> NoShell:
    """Return what stands for IPython's shell."""
    return NoShell()


def display(*_: Any, **__: Any) -> None:
    """Show nothing: nobody looks."""


def parsed(source: str) -> tuple[ast.Module, list[int]]:
    """Return the code of a cell, and the numbers of the lines at its top level that were left out.

    Raises: SyntaxError for a cell that is no Python even so, or belongs to another language.
    """
    source = _without_cell_magic(source)
    left_out = [1 + source[: source.find("\0")].count("\n")] if "\0" in source else []
    tree = _parse(source.replace("\0", ""))
    kept = [node for node in tree.body if not _is_command(node)]
    left_out += [node.lineno for node in tree.body if _is_command(node)]
    tree.body = kept
    return tree, left_out


def has_commands(source: str) -> bool:
    """Return whether a line of the cell begins as a magic or a shell command does."""
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
    """Return the cell with calls in place of its commands. Raises: SyntaxError at a line that is no command.

    A line is replaced only if Python stops reading there: one that begins with % may go on an expression.
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
    """Return the cell as IPython hands it to Python: prompts and common indentation are gone as well."""
    from IPython.core.inputtransformer2 import TransformerManager

    blank = len(source) - len(source.lstrip("\n"))
    return "\n" * blank + TransformerManager().transform_cell(source)


def _without_cell_magic(source: str) -> str:
    """Return the cell without a magic of the whole cell in its first line; a null character marks the place.

    Raises: SyntaxError where the cell is another language's.
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
    """Whether a statement is a call of get_ipython() and no more."""
    part: Any = node.value if isinstance(node, ast.Expr) else None
    while isinstance(part, (ast.Call, ast.Attribute)):
        part = part.func if isinstance(part, ast.Call) else part.value
    return isinstance(part, ast.Name) and part.id == "get_ipython"
