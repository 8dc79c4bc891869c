"""Measure how long a person in a checkout waits for each lesson, for its first cell, and for `make test`."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nbformat

from ringlab.bench.device import machine
from ringlab.errors import CourseError
from ringlab_course.builder.execution import execute

Tick = Callable[[], object]


def bench_lessons(
    only: Sequence[str] = (), checkout: Path | None = None, tick: Tick = lambda: None
) -> dict[str, Any]:
    """Return the seconds that each lesson takes, and that its first cell alone takes, in fresh kernels.

    The start of the kernel is not counted: the median time of three notebooks with one empty cell is
    subtracted.
    only: the numbers of the lessons to run, such as "05"; all lessons if empty.
    Raises: CourseError outside of a checkout, for a number without a lesson, or if a lesson fails.
    """
    lessons = _lessons(checkout)
    for number in only:
        if not any(path.name.startswith(f"{number}_") for path in lessons):
            raise CourseError(f"one of the lessons {', '.join(path.name[:2] for path in lessons)}", number)
    files = [path for path in lessons if not only or path.name.partition("_")[0] in only]
    empty = [_seconds(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("")])) for _ in range(4)]
    # The first empty notebook is not counted, because its run reads the libraries from the disk.
    start = statistics.median(empty[1:])
    seconds, first = {}, {}
    for path in files:
        notebook = nbformat.read(path, as_version=4)
        head = next(index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code")
        opening = nbformat.v4.new_notebook(cells=notebook.cells[: head + 1], metadata=notebook.metadata)
        first[path.stem] = round(max(0.0, _seconds(opening) - start), 2)
        seconds[path.stem] = round(max(0.0, _seconds(notebook) - start), 1)
        tick()
    return {"seconds": seconds, "first_cell": first, "kernel_start": round(start, 2), "machine": machine()}


def kept(measured: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return `measured`, completed with the seconds of other lessons from `file`.

    Raises: CourseError if `file` contains no such seconds.
    """
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        parts = {name: {**before[name], **measured[name]} for name in ("seconds", "first_cell")}
    except (ValueError, KeyError, TypeError) as error:
        raise CourseError(f"a file of `ringlab bench lessons` at {file}", repr(error)) from None
    return {**measured, **parts}


def bench_tests(checkout: Path | None = None) -> dict[str, Any]:
    """Return the seconds of `make test` in a fresh clone, and the largest memory of one of its processes.

    The clone is of the last commit, and the seconds include the set-up of its environment.
    Raises: CourseError outside of a checkout, or if the tests fail.
    """
    root = _lessons(checkout)[0].parents[1]
    with tempfile.TemporaryDirectory(prefix="make test ") as folder:
        clone = Path(folder) / "ringlab"
        cloned = subprocess.run(["git", "clone", "-q", root, clone], capture_output=True, text=True)
        if cloned.returncode:
            raise CourseError("a checkout that git can clone", cloned.stderr.strip())
        begin = time.perf_counter()
        done = subprocess.run(["make", "test"], cwd=clone, capture_output=True, text=True)
        took = round(time.perf_counter() - begin)
    if done.returncode:
        raise CourseError("`make test` that passes", (done.stdout[-3000:] + done.stderr[-1000:]).strip())
    passed = sum(map(int, re.findall(r"(\d+) passed.* in ", done.stdout)))
    peaks = re.findall(r"^peak of memory of any process: (.*)$", done.stdout, re.MULTILINE)
    most = max(map(float, re.findall(r"([\d.]+) GB", " ".join(peaks))))
    return {"seconds": took, "passed": passed, "peak_gb": most, "machine": machine()}


def _lessons(checkout: Path | None) -> list[Path]:
    root = checkout or Path.cwd()
    found = sorted((root / "notebooks").glob("*.ipynb"))
    if not found:
        raise CourseError(
            "a checkout of ringlab, with notebooks/", str(root), "run it in the root of a clone"
        )
    return found


def _seconds(notebook: nbformat.NotebookNode) -> float:
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    return time.perf_counter() - begin
