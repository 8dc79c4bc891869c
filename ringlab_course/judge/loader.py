"""Load the functions to be graded from a notebook's code cells, without running the rest of the notebook.

The loader runs in the worker, because even parsing a submission might crash the process.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import linecache
import re
import signal
import symtable
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from ringlab_course.judge import commands
from ringlab_course.judge.processes import waited_seconds

NAME = "__main__"
SECONDS = 5.0
"""The time limit of one statement, in seconds: enough to fill a table, too little for a benchmark."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


@dataclass
class _Statement:
    """One top-level statement: the names it gives a value or changes, and the names it needs for that.

    asks: names whose methods are called, or that decorate a definition. Unless they are modules, the
    statement may change their objects.
    effects: the global names that the functions defined here change when they are called.
    """

    cell: int
    node: ast.stmt
    writes: set[str]
    reads: set[str]
    asks: set[str] = field(default_factory=set)
    effects: set[str] = field(default_factory=set)


class _TooSlow(BaseException):
    """A statement has used up its time. It is not an Exception, so `except Exception` does not catch it."""


def load(
    cells: Sequence[str], functions: Sequence[str], seconds: float = SECONDS
) -> tuple[dict[str, Any], list[str]]:
    """Return the namespace in which `functions` are defined, and notes on what could not be run.

    A statement runs only if it defines the functions, or if it defines or changes a name that the functions
    need. Such statements are imports, helpers, constants, tables, registries and set-up functions. Calls of
    check(), plots and experiments do not run. Magic and shell lines, and cells of another language, are left
    out. A statement that runs longer than `seconds` is stopped. When the statements have used twice that time
    together, each further statement gets a fiftieth of `seconds`.
    """
    statements, notes = _parsed(cells)
    left, least = 2 * seconds, seconds / 50
    namespace, flags = _fresh_namespace(), 0
    for statement in _needed(statements, functions):
        flags |= _future(statement.node)
        module = ast.Module([statement.node], type_ignores=[])
        limit, began = _limit(statement.node, seconds), _own_time()
        limit = limit and min(limit, max(left, least))
        try:
            with _ended_after(limit):
                exec(compile(module, _filename(statement.cell), "exec", flags, dont_inherit=True), namespace)
        except _TooSlow:
            place = f"cell {statement.cell + 1}, line {statement.node.lineno}"
            notes.append(f"{place} was broken off: it ran for more than {limit:.2g} s")
        except BaseException as error:  # SystemExit is caught too, because the other cells still count
            names = ", ".join(sorted(statement.writes))
            notes.append(
                f"cell {statement.cell + 1}, which defines {names}: {type(error).__name__}: {error}"[:500]
            )
        left -= _own_time() - began if limit else 0
    missing = [name for name in functions if not callable(namespace.get(name))]
    notes += [f"no code cell defines the function {name}" for name in missing]
    return namespace, notes


def run_imports(cells: Sequence[str], functions: Sequence[str]) -> list[str]:
    """Import what `load` would import, and what the functions that it defines import when called.

    Return the modules that could be imported. Nothing else of the cells runs.
    """
    statements, done = _parsed(cells)[0], list[str]()
    for statement in _needed(statements, functions):
        for node in ast.walk(statement.node):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                code = compile(ast.Module([node], type_ignores=[]), _filename(statement.cell), "exec")
                with contextlib.suppress(Exception):
                    exec(code, {"__name__": NAME})
                    done.append(ast.unparse(node))
    return done


def sources(cells: Sequence[str], functions: Sequence[str]) -> dict[str, str]:
    """Return the text of the last top-level definition of each of `functions`, by name; nothing is run."""
    statements, _ = _parsed(cells)
    nodes = {getattr(each.node, "name", ""): each.node for each in statements}
    found = {name: nodes[name] for name in functions if isinstance(nodes.get(name), ast.FunctionDef)}
    return {name: ast.unparse(node) for name, node in found.items()}


def _limit(node: ast.stmt, seconds: float) -> float:
    """Return the time limit of a statement in seconds, or 0 for no limit.

    Definitions have no limit, and loops and calls get less time than assignments.
    """
    if isinstance(node, DEFINITIONS):
        return 0.0
    return seconds if isinstance(node, (ast.Assign, ast.AnnAssign)) else 0.4 * seconds


def _own_time() -> float:
    """Return the seconds on the wall clock, less the time for which this thread waited for a processor."""
    return time.monotonic() - waited_seconds([Path("/proc/thread-self")])


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Raise _TooSlow in the block after `seconds`, or never if 0. Works only in the main thread."""
    end, under_way = _own_time() + seconds, True

    def ring(number: int, frame: FrameType | None) -> None:
        if under_way and (left := end - _own_time()) > 0.001:
            signal.setitimer(signal.ITIMER_REAL, left)
        elif under_way:
            raise _TooSlow

    try:
        before = signal.signal(signal.SIGALRM, ring) if seconds else None
    except (ValueError, AttributeError):  # not in the main thread, or no such signal on this system
        seconds = 0.0
    if not seconds:
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        under_way = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


def _fresh_namespace() -> dict[str, Any]:
    module = ModuleType(NAME)
    sys.modules[NAME] = module  # dataclasses and pickle look the module up in sys.modules
    more = {"display": commands.display, "get_ipython": commands.get_ipython}
    module.__dict__["__builtins__"] = {**vars(builtins), **more}  # where IPython puts them
    return module.__dict__


def _filename(cell: int) -> str:
    return f"<cell {cell + 1}>"


def _parsed(cells: Sequence[str]) -> tuple[list[_Statement], list[str]]:
    statements: list[_Statement] = []
    notes: list[str] = []
    for number, raw in enumerate(cells):
        source = re.sub("\r\n?", "\n", raw.removeprefix("\ufeff"))
        try:
            tree, left_out = commands.parsed(source)
            found = [_statement(number, node) for node in tree.body]
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            what = (
                "it holds a magic or shell line"
                if commands.has_commands(source)
                else f"{type(error).__name__}: {error}"
            )
            notes.append(f"cell {number + 1} was not run: {what}"[:500])
            continue
        notes += [
            f"cell {number + 1} was run without line {line}, a magic or shell line" for line in left_out
        ]
        lines = [f"{line}\n" for line in source.split("\n")]
        linecache.cache[_filename(number)] = (len(source), None, lines, _filename(number))
        statements += found
    return statements, notes


def _statement(cell: int, node: ast.stmt) -> _Statement:
    table = symtable.symtable(ast.unparse(node), "<cell>", "exec")
    reads = _reads(table)
    writes = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    declared = {
        s.get_name() for child in table.get_children() for s in child.get_symbols() if s.is_declared_global()
    }
    stored, asked = _stored(node), _asked(node)
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return _Statement(cell, node, writes | stored, reads, asked)
    heads = [*node.decorator_list, *(node.bases if isinstance(node, ast.ClassDef) else ())]
    effects = declared | ((stored | asked) & reads)
    return _Statement(cell, node, writes | declared, reads, _names(heads), effects)


def _stored(node: ast.stmt) -> set[str]:
    """Return the names whose objects a statement changes: x[0] = …, x.y = …."""
    parts = (part for part in ast.walk(node) if isinstance(part, (ast.Subscript, ast.Attribute)))
    return {_base_name(part) for part in parts if isinstance(part.ctx, ast.Store)} - {""}


def _asked(node: ast.stmt) -> set[str]:
    """Return the names whose objects a statement may change by a call: x.append(…), setattr(x, …)."""
    bases: list[ast.expr] = []
    for part in ast.walk(node):
        if isinstance(part, ast.Expr) and isinstance(call := part.value, ast.Call):
            if isinstance(call.func, ast.Name) and call.func.id in ("setattr", "delattr"):
                bases += call.args[:1]
            elif not isinstance(call.func, ast.Name):
                bases.append(call.func)
    return {_base_name(base) for base in bases} - {""}


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}


def _base_name(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _reads(table: symtable.SymbolTable) -> set[str]:
    """Return the global names that a statement refers to, including those in functions that it defines."""
    top = table.get_type() == "module"
    names = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())}
    for child in table.get_children():
        names |= _reads(child)
    return names


def _needed(statements: Sequence[_Statement], functions: Collection[str]) -> list[_Statement]:
    modules = dict(item for each in statements for item in _imports(each.node))
    constants = _constants(statements)
    _add_effects(statements, functions)
    for each in statements:
        each.writes |= each.asks - modules.keys()
    wanted, chosen = set(functions), set()
    growing = True
    while growing:
        growing = False
        for number, each in enumerate(statements):
            needed = each.writes & wanted or _takes_all(each.node) or _sets(each, modules, constants, wanted)
            if number not in chosen and needed:
                chosen.add(number)
                wanted |= each.reads
                growing = True
    return [statements[number] for number in sorted(chosen)]


def _sets(
    statement: _Statement, modules: Mapping[str, str], constants: Collection[str], wanted: Collection[str]
) -> bool:
    """Return whether a statement changes a setting, as `torch.manual_seed(SEED)` does.

    Such a statement calls a function of a needed module, or of `sys`, and its arguments need no earlier
    computation.
    """
    node = statement.node
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    base = _base_name(node.value.func)
    needed = base in modules and (base in wanted or modules[base] == "sys")
    return needed and all(name in modules or name in constants for name in statement.reads)


def _imports(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield the names that a statement imports, each with its module."""
    if hasattr(node, "name"):  # names that a function imports are local to it
        return
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            yield from ((alias.asname or alias.name.partition(".")[0], alias.name) for alias in part.names)
        elif isinstance(part, ast.ImportFrom):
            yield from ((alias.asname or alias.name, part.module or "") for alias in part.names)


def _constants(statements: Iterable[_Statement]) -> set[str]:
    """Return the names whose assigned values never read another name, such as numbers and strings."""
    values: dict[str, bool] = {}
    for each in statements:
        literal = isinstance(each.node, ast.Assign) and not each.reads
        for name in each.writes:
            values[name] = values.get(name, True) and literal
    return {name for name, literal in values.items() if literal}


def _add_effects(statements: Sequence[_Statement], functions: Collection[str]) -> None:
    """Add to the `writes` of each statement the names that its set-up functions change.

    A set-up function is one that the statement calls or is decorated with. Functions to be graded do not
    count, because experiments call them.
    """
    effects: dict[str, set[str]] = {}
    readers: dict[str, set[str]] = {}
    for each in statements:
        name = getattr(each.node, "name", "")
        if name and name not in functions:
            effects.setdefault(name, set()).update(each.effects)
            readers.setdefault(name, set()).update(each.reads)
    growing = True
    while growing:
        sizes = sum(map(len, effects.values()))
        for name, reads in readers.items():
            effects[name].update(*(effects[other] for other in reads & effects.keys()))
        growing = sum(map(len, effects.values())) > sizes
    for each in statements:
        each.writes |= _effects_of(each, effects)


def _effects_of(statement: _Statement, effects: Mapping[str, set[str]]) -> set[str]:
    node = statement.node
    parts: Sequence[ast.AST] = getattr(node, "decorator_list", ()) if hasattr(node, "name") else (node,)
    return set().union(*(effects[name] for name in _names(parts) & effects.keys()))


def _future(node: ast.stmt) -> int:
    if not isinstance(node, ast.ImportFrom) or node.module != "__future__":
        return 0
    names = [alias.name for alias in node.names if alias.name in __future__.all_feature_names]
    return sum(getattr(__future__, name).compiler_flag for name in names)


def _takes_all(node: ast.stmt) -> bool:
    """Return whether a statement affects everything: `from m import *`, or an import from `__future__`."""
    return isinstance(node, ast.ImportFrom) and (
        node.module == "__future__" or any(a.name == "*" for a in node.names)
    )
