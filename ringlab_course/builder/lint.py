"""The rules that every notebook of the course follows. Each rule returns a description of every violation."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from nbformat import NotebookNode

LONGEST_LINE = 100
_INSTALL = re.compile(
    r"^\s*(!|%|%%)?\s*(pip|pip3|conda|mamba|apt|apt-get|uv pip)\s+install\b|^\s*!", re.MULTILINE
)

Rule = Callable[[NotebookNode, str], list[str]]


def lint(notebook: NotebookNode) -> list[str]:
    """Return descriptions of all violated rules in a built notebook, or an empty list."""
    kind = notebook.metadata.get("ringlab", {}).get("kind", "lesson")
    return [problem for rule in RULES for problem in rule(notebook, kind)]


def line_width(notebook: NotebookNode, kind: str) -> list[str]:
    """No line of code is so long that it has to be scrolled in a window of 1,400 pixels."""
    return [
        f"{_named(number, cell)} has a line of {widest} characters, at most {LONGEST_LINE}"
        for number, cell in _code(notebook)
        if (widest := max(map(len, cell.source.splitlines()), default=0)) > LONGEST_LINE
    ]


def no_path_tricks(notebook: NotebookNode, kind: str) -> list[str]:
    """No cell changes sys.path, because the package is installed."""
    return [f"{_named(n, c)} touches sys.path" for n, c in _code(notebook) if "sys.path" in c.source]


def no_installs(notebook: NotebookNode, kind: str) -> list[str]:
    """No cell installs a package or calls a shell."""
    return [
        f"{_named(n, c)} installs something or calls a shell"
        for n, c in _code(notebook)
        if _INSTALL.search(c.source)
    ]


def no_trailing_semicolon(notebook: NotebookNode, kind: str) -> list[str]:
    """No line ends in a semicolon, because nbval fails on a hidden result."""
    return [
        f"{_named(n, c)} has a line that ends in a semicolon"
        for n, c in _code(notebook)
        if any(line.rstrip().endswith(";") for line in c.source.splitlines())
    ]


def one_import_cell(notebook: NotebookNode, kind: str) -> list[str]:
    """All imports are in one cell."""
    importing = [(n, c) for n, c in _code(notebook) if _imports(c.source)]
    return [f"{_named(n, c)} imports; all imports stand in one cell" for n, c in importing[1:]]


def header(notebook: NotebookNode, kind: str) -> list[str]:
    """The first cell has a title and the minutes needed, and what its kind of notebook requires.

    For a lesson these are its aims and what the reader needs first; for an exercise, what its answers may not
    use.
    """
    text = notebook.cells[0].source if notebook.cells and notebook.cells[0].cell_type == "markdown" else ""
    wanted = {"a title (# …)": r"^# \S", "**Minutes**": r"(?i)minutes"}
    if kind == "lesson":
        wanted |= {
            "**Afterwards you can**": r"(?i)afterwards you can",
            "**You need first**": r"(?i)you need first",
        }
    else:
        wanted |= {"**Not allowed:**": r"\*\*Not allowed:\*\*"}
    missing = [what for what, pattern in wanted.items() if not re.search(pattern, text, re.MULTILINE)]
    return [f"the first cell lacks {', '.join(missing)}"] if missing else []


def closing(notebook: NotebookNode, kind: str) -> list[str]:
    """A lesson has a recap, a self-check and a link to its exercise."""
    if kind != "lesson":
        return []
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    wanted = {
        "a heading Recap": r"^#+ .*recap",
        "a heading Self-check": r"^#+ .*self-check",
        "a link to ../exercises/": r"\]\(\.\./exercises/\d\d_\w+\.ipynb\)",
    }
    return [f"lacks {what}" for what, pattern in wanted.items() if not re.search(pattern, text, re.I | re.M)]


def figures_have_alt_text(notebook: NotebookNode, kind: str) -> list[str]:
    """Every figure and image has alternative text."""
    problems = []
    for number, cell in _code(notebook):
        for output in cell.get("outputs", []):
            for mime in set(output.get("data", {})) & {"image/png", "image/svg+xml"}:
                if not output.get("metadata", {}).get(mime, {}).get("alt"):
                    problems.append(f"{_named(number, cell)} shows a figure without alt text")
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown" and re.search(r"!\[\s*\]\(", cell.source):
            problems.append(f"{_named(number, cell)} has an image without alt text")
    return problems


def code_in_summaries_is_html(notebook: NotebookNode, kind: str) -> list[str]:
    """No <summary> contains backticks, because Markdown is not rendered inside <summary>."""
    return [
        f"{_named(number, cell)} has backticks in a <summary>: write <code>"
        for number, cell in enumerate(notebook.cells, 1)
        if cell.cell_type == "markdown" and re.search(r"<summary>(?:(?!</summary>)[\s\S])*`", cell.source)
    ]


def graded_cells_are_checked(notebook: NotebookNode, kind: str) -> list[str]:
    """Every graded function has a cell with `check("NN.stage")` after it."""
    problems, sources = [], [cell.source for cell in notebook.cells]
    for number, cell in _code(notebook):
        grade = cell.metadata.get("grade")
        if grade and not any(f'check("{grade}")' in source for source in sources[number:]):
            problems.append(f'{_named(number, cell)} is graded but no check("{grade}") follows')
    return problems


def check_and_hint_are_imported(notebook: NotebookNode, kind: str) -> list[str]:
    """Every exercise imports `check` and `hint`, because it tells its reader to call them."""
    imported = {name for _, cell in _code(notebook) for name in _imported(cell.source)}
    missing = [name for name in ("check", "hint") if name not in imported]
    return [f"does not import {' and '.join(missing)}"] if kind == "exercise" and missing else []


def running_spends_no_hint(notebook: NotebookNode, kind: str) -> list[str]:
    """No cell calls hint(), because a learner who runs all cells would then see every hint."""
    return [
        f"{_named(number, cell)} calls hint()"
        for number, cell in _code(notebook)
        if any(map(_is_hint, ast.walk(_parsed(cell.source))))
    ]


RULES: tuple[Rule, ...] = (
    line_width,
    no_path_tricks,
    no_installs,
    no_trailing_semicolon,
    one_import_cell,
    header,
    closing,
    figures_have_alt_text,
    code_in_summaries_is_html,
    graded_cells_are_checked,
    check_and_hint_are_imported,
    running_spends_no_hint,
)


def _code(notebook: NotebookNode) -> list[tuple[int, Any]]:
    return [(number, cell) for number, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code"]


def _named(number: int, cell: Any) -> str:
    return f"cell {number} ({(cell.source.splitlines() or [''])[0][:50]!r})"


def _imports(source: str) -> bool:
    return bool(_imported(source))


def _parsed(source: str) -> ast.Module:
    """Return a cell's syntax tree, or an empty one if the cell contains a magic (see `no_installs`)."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])


def _is_hint(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hint"


def _imported(source: str) -> list[str]:
    """Return the names that the top level of a cell imports."""
    body = _parsed(source).body
    imports = [statement for statement in body if isinstance(statement, (ast.Import, ast.ImportFrom))]
    return [name.asname or name.name for statement in imports for name in statement.names]
