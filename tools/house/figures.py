"""The figures of the project's house: what each is today, measured from the tree, and what it should be."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import docstrings, imports

LONG = 300
"""Lines above which a file is looked at: has it two jobs?"""
LAYOUT_NAMES = {"contiguous", "striped", "zigzag", "zig-zag"}
_EXERCISES = "ringlab_course/exercises"
_SUBMISSIONS = "tests/course/submissions"


@dataclass(frozen=True)
class Figure:
    """One row of the table. `ok` says whether what was measured is what is wanted."""

    name: str
    measured: str
    wanted: str
    ok: bool


def figures(root: Path = imports.CHECKOUT) -> list[Figure]:
    """Return every row of the table for the tree at `root`."""
    return [row for measure in MEASURES for row in measure(root)]


def table(rows: list[Figure]) -> str:
    """Return the rows as a Markdown table; a mark stands before each that is as wanted."""
    lines = ["| | What | Measured today | Wanted |", "|---|---|---|---|"]
    lines += [f"| {'✓' if row.ok else '·'} | {row.name} | {row.measured} | {row.wanted} |" for row in rows]
    return "\n".join(lines)


def of_imports(root: Path) -> Iterator[Figure]:
    """Yield circles of imports and imports that point up."""
    circles = imports.circles(root)
    named = "; ".join(" ↔ ".join(each) for each in circles)
    yield _at_most("circles of imports", len(circles), 0, f": {named}" if named else "")
    yield _at_most("imports upward", len(imports.all_upward(root)), 0)


def of_readme(root: Path) -> Iterator[Figure]:
    """Yield the size of the README."""
    size = (root / "README.md").stat().st_size
    yield Figure("README", f"{size / 1000:.1f} KB", "–", True)


def of_the_ring(root: Path) -> Iterator[Figure]:
    """Yield the size of the ring in one file, and which modules of ours it imports."""
    path = root / "ringlab/plain_ring.py"
    name, wanted = "to read for the ring, forward and backward", "1 file"
    if not path.exists():
        yield Figure(name, "no ringlab/plain_ring.py", wanted, False)
        return
    text = path.read_text(encoding="utf-8")
    needed = sorted({module for _, module, _ in imports.imports("ringlab.plain_ring", text)})
    lines = len(text.splitlines())
    yield Figure(name, f"1 file, {lines} lines; imports {', '.join(needed) or 'nothing'}", wanted, True)


def of_exercises(root: Path) -> Iterator[Figure]:
    """Yield the files of the fullest and of the leanest exercise, not counting its right answers."""
    counts = {
        folder.name: sum(
            1
            for path in folder.rglob("*")
            if path.is_file() and not {"__pycache__", "right"} & set(path.relative_to(folder).parts)
        )
        for folder in sorted((root / _EXERCISES).iterdir())
        if folder.is_dir() and folder.name != "__pycache__"
    }
    most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    measured = f"{counts[least]} ({least}) to {counts[most]} ({most})"
    yield Figure("files in an exercise's folder, beside right/", measured, "–", True)


def of_submissions(root: Path) -> Iterator[Figure]:
    """Yield the files and lines of answers that stand apart from their exercise."""
    files = list((root / _SUBMISSIONS).rglob("*.py"))
    measured = f"{len(files):,} files, {_lines(files):,} lines"
    yield Figure(_SUBMISSIONS, measured, "none: edits beside the exercise", not files)


def of_mistakes(root: Path) -> Iterator[Figure]:
    """Yield the kinds of places in which a mistake is written down."""
    python = "\n".join(path.read_text(encoding="utf-8") for path in (root / "ringlab_course").rglob("*.py"))
    places = {
        "Misconception(…)": re.search(r"^\s+Misconception\($|\bMisconception\(\"", python, re.MULTILINE),
        "kills=": re.search(r"\bkills=", python),
        "headers of submissions": any((root / _SUBMISSIONS).rglob("wrong_*.py")),
        "wrong_answers.md": any((root / _EXERCISES).rglob("wrong_answers.md")),
        "docs/kill-matrix.md": (root / "docs/kill-matrix.md").exists(),
    }
    there = [name for name, found in places.items() if found]
    yield Figure("places of a mistake", f"{len(there)}: {', '.join(there)}", "1", len(there) <= 1)


def of_layouts(root: Path) -> Iterator[Figure]:
    """Yield the modules with a table by layouts' names, or with a constant that lists their names."""
    found = [
        name
        for name, path in imports.modules(root)
        if not name.startswith("ringlab_course.exercises.")  # an exercise may ask for some layouts by name
        and _has_layout_table(path.read_text(encoding="utf-8"))
    ]
    yield _at_most("tables of layout names", len(found), 1, f": {', '.join(found)}" if found else "")


def _has_layout_table(source: str) -> bool:
    tree = ast.parse(source)
    constants = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    lists = [node.elts for node in constants if isinstance(node, ast.Tuple | ast.List)]
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    return any(sum(map(_names_a_layout, entries)) >= 3 for entries in lists) or any(
        sum(map(_names_a_layout, node.keys)) >= 3 and not _is_of_exports(node) for node in tables
    )


def _names_a_layout(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value in LAYOUT_NAMES


def _is_of_exports(table: ast.Dict) -> bool:
    """Return whether a table says of each layout only in which module it is, as that of the package's exports does."""
    of_layouts = [value for key, value in zip(table.keys, table.values, strict=True) if _names_a_layout(key)]
    return len({ast.dump(value) for value in of_layouts}) == 1 and isinstance(of_layouts[0], ast.Constant)


def of_dependencies(root: Path) -> Iterator[Figure]:
    """Yield what a plain install brings."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[\s<>=!~;\[]", line)[0] for line in project["dependencies"]]
    heavy = {"jupyterlab", "ipywidgets", "matplotlib", "jupytext", "ipykernel", "nbformat"} & {*names}
    wanted = "no Jupyter, no matplotlib"
    yield Figure("base install", f"{len(names)}: {', '.join(names)}", wanted, not heavy)


def of_lengths(root: Path) -> Iterator[Figure]:
    """Yield long files, and the lines of both packages."""
    for package in imports.PACKAGES:
        paths = [path for name, path in imports.modules(root) if name.split(".")[0] == package]
        long = sum(len(path.read_text(encoding="utf-8").splitlines()) > LONG for path in paths)
        yield Figure(
            f"files above {LONG} lines in {package}",
            f"{long} of {len(paths)}",
            "– (each one job: for a reader to judge)",
            True,
        )
    reference, course = (_lines([*(root / package).rglob("*.py")]) for package in imports.PACKAGES)
    yield Figure("lines of ringlab", f"{reference:,}", "–", True)
    yield Figure("lines of ringlab_course", f"{course:,}", "–", True)


def of_docstrings(root: Path) -> Iterator[Figure]:
    """Yield what docstrings and annotations of the reference leave out."""
    found = docstrings.missing(docstrings.Package(root))
    names = {
        "examples": "exported names without a runnable example",
        "methods": "public methods without a docstring",
        "raises": "public functions that raise without `Raises:`",
        "axes": "public functions with arrays without axes",
    }
    for kind, name in names.items():
        yield _at_most(name, sum(map(len, found[kind].values())), 0)


def of_tests(root: Path) -> Iterator[Figure]:
    """Yield the time and the memory of `make test`, as measured when they were last committed."""
    path = root / "benchmarks/results/waiting/tests.json"
    if not path.exists():
        yield Figure("`make test` from a fresh clone", "not measured", "< 10 min", False)
        yield Figure("memory of a process of `make test`", "not measured", "< 1 GB", False)
        return
    measured = json.loads(path.read_text(encoding="utf-8"))
    where = f"on {measured['machine']['cores']} cores, {measured['machine']['date'][:10]}"
    minutes, peak = measured["seconds"] / 60, measured["peak_gb"]
    yield Figure("`make test` from a fresh clone", f"{minutes:.1f} min {where}", "< 10 min", minutes < 10)
    yield Figure("memory of a process of `make test`", f"{peak:.2f} GB {where}", "< 1 GB", peak < 1)


def of_git(root: Path) -> Iterator[Figure]:
    """Yield the number of files in git."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    count = listed.stdout.count("\0")
    yield Figure("files in git", f"{count:,}", "–", True)


MEASURES: tuple[Callable[[Path], Iterator[Figure]], ...] = (
    of_imports, of_readme, of_the_ring, of_exercises, of_submissions, of_mistakes, of_layouts, of_dependencies,
    of_lengths, of_docstrings, of_tests, of_git,
)  # fmt: skip


def _at_most(name: str, count: int, most: int, detail: str = "") -> Figure:
    return Figure(name, f"{count}{detail}", str(most), count <= most)


def _lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
