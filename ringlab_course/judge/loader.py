"""A notebook's code cells → the functions to be graded, without running the rest of the notebook.

Runs in the worker: even parsing a submission is left to a process that may crash.
"""

from __future__ import annotations
import __future__

import ast
import linecache
import symtable
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ringlab import moved

NAME = "__main__"


@dataclass
class _Statement:
    """One top-level statement: the names it gives a value, and the names it needs for that."""

    cell: int
    node: ast.stmt
    writes: set[str]
    reads: set[str]


def load(cells: Sequence[str], functions: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the namespace in which `functions` are defined, and notes: what could not be run, old names of modules.

    Of all cells only those statements run that define the functions or a name that they need:
    imports, helpers, constants. Calls of check(), plots and experiments do not run. Magic and
    shell lines are left out, and cells of another language.
    """
    statements, notes = _parsed(cells)
    namespace, flags = _fresh_namespace(), 0
    for statement in _needed(statements, functions):
        flags |= _future(statement.node)
        module = ast.Module([statement.node], type_ignores=[])
        try:
            exec(compile(module, _filename(statement.cell), "exec", flags, dont_inherit=True), namespace)
        except BaseException as error:  # SystemExit too: the other cells count all the same
            names = ", ".join(sorted(statement.writes))
            notes.append(
                f"cell {statement.cell + 1}, which defines {names}: {type(error).__name__}: {error}"[:500]
            )
    missing = [name for name in functions if not callable(namespace.get(name))]
    notes += [f"no code cell defines the function {name}" for name in missing]
    notes += moved.notices()
    return namespace, notes


def _fresh_namespace() -> dict[str, Any]:
    module = ModuleType(NAME)
    sys.modules[NAME] = module  # dataclasses and pickles look the module up
    return module.__dict__


def _filename(cell: int) -> str:
    return f"<cell {cell + 1}>"


def _parsed(cells: Sequence[str]) -> tuple[list[_Statement], list[str]]:
    statements: list[_Statement] = []
    notes: list[str] = []
    for number, source in enumerate(cells):
        try:
            tree, left_out = _python(source)
            found = [_statement(number, node) for node in tree.body]
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            magic = any(line.lstrip().startswith(("%", "!")) for line in source.splitlines())
            what = "it holds a magic or shell line" if magic else f"{type(error).__name__}: {error}"
            notes.append(f"cell {number + 1} was not run: {what}"[:500])
            continue
        notes += [
            f"cell {number + 1} was run without line {line}, a magic or shell line" for line in left_out
        ]
        linecache.cache[_filename(number)] = (len(source), None, source.splitlines(True), _filename(number))
        statements += found
    return statements, notes


def _python(source: str) -> tuple[ast.Module, list[int]]:
    """Return the code of a cell, and the numbers of the lines that only a notebook understands and that are left out.

    Left out is the line at which Python stops reading, and no other: a line that begins with % may go on an expression.
    """
    lines, left_out = source.splitlines(), list[int]()
    while True:
        try:
            return ast.parse("\n".join(lines) if left_out else source), left_out
        except SyntaxError as error:
            number = error.lineno or 0
            if not (0 < number <= len(lines) and _is_command(lines[number - 1], first=number == 1)):
                raise
            lines[number - 1] = ""
            left_out.append(number)


def _is_command(line: str, first: bool) -> bool:
    """Whether a line is a magic or shell line; a magic of a whole cell only if it leaves the cell Python."""
    if line.startswith("%%"):
        return first and line.split()[0] in ("%%time", "%%capture")
    return line.startswith(("%", "!"))


def _statement(cell: int, node: ast.stmt) -> _Statement:
    table = symtable.symtable(ast.unparse(node), "<cell>", "exec")
    writes = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    writes |= {
        s.get_name() for child in table.get_children() for s in child.get_symbols() if s.is_declared_global()
    }
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        writes |= _changed(node)
    return _Statement(cell, node, writes, _reads(table))


def _changed(node: ast.stmt) -> set[str]:
    """Names whose objects a statement changes: x[0] = …, x.y = …, x.append(…)."""
    bases: list[ast.expr] = []
    for part in ast.walk(node):
        if isinstance(part, (ast.Subscript, ast.Attribute)) and isinstance(part.ctx, ast.Store):
            bases.append(part)
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call):
            bases.append(part.value.func)
    return {name for base in bases if not isinstance(base, ast.Name) and (name := _base_name(base))}


def _base_name(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _reads(table: symtable.SymbolTable) -> set[str]:
    """Global names that a statement refers to, in the functions it defines too."""
    top = table.get_type() == "module"
    names = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())}
    for child in table.get_children():
        names |= _reads(child)
    return names


def _needed(statements: Sequence[_Statement], functions: Iterable[str]) -> list[_Statement]:
    wanted, chosen = set(functions), set()
    growing = True
    while growing:
        growing = False
        for number, statement in enumerate(statements):
            if number not in chosen and (statement.writes & wanted or _takes_all(statement.node)):
                chosen.add(number)
                wanted |= statement.reads
                growing = True
    return [statements[number] for number in sorted(chosen)]


def _future(node: ast.stmt) -> int:
    if not isinstance(node, ast.ImportFrom) or node.module != "__future__":
        return 0
    names = [alias.name for alias in node.names if alias.name in __future__.all_feature_names]
    return sum(getattr(__future__, name).compiler_flag for name in names)


def _takes_all(node: ast.stmt) -> bool:
    """`from m import *` may define anything; `from __future__` changes how all is compiled."""
    return isinstance(node, ast.ImportFrom) and (
        node.module == "__future__" or any(a.name == "*" for a in node.names)
    )
