"""Whatever a notebook runs is run, and a notebook that another program has saved earns what it earned before.

What sets up a function is run with it; an experiment costs nothing but its time.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringlab.checkout import find_checkout
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.reports import run_in_process
from ringlab_course.judge.loader import load
from ringlab_course.judge.submission import Submission, exercise_of, read_submission


@pytest.fixture(autouse=True)
def own_main(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


COMMANDS = {
    "indented magic": "for n in range(3):\n    %timeit n",
    "magic alone in a body": "if True:\n    %timeit 1",
    "kept result": "t = %timeit -o -n 1 1",
    "help": "math.exp?",
    "help on its source": "math.exp??",
    "help before the name": "?math.exp",
    "shell output": "files = !ls\nfirst, *rest = !ls",
    "quote in a shell line": "!echo it's",
    "blank line before a cell's magic": "\n\n%%time",
    "form feed": "\x0c\n%who",
    "Windows' ends of lines": "x = 1\r\n%who\r",
    "mark of byte order": "\ufeff",
    "another magic, another name": "%matplotlib inline",
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("ipython", [True, False])
def test_a_cell_that_a_notebook_runs_is_run(monkeypatch, name, ipython) -> None:
    if not ipython:
        monkeypatch.setitem(sys.modules, "IPython.core.inputtransformer2", None)
    namespace, notes = load([f"{COMMANDS[name]}\ndef f():\n    return 1"], ["f"])
    assert namespace["f"]() == 1
    assert all("without line" in note for note in notes)


@pytest.mark.parametrize(
    "cell",
    [">>> def f():\n...     return 1", "    def f():\n        return 1", "%who\n  def f():\n    return 1"],
)
def test_what_ipython_alone_can_read_is_left_to_it(cell) -> None:
    pytest.importorskip("IPython")
    assert ("f" in load([cell], ["f"])[0]) == (not cell.startswith("%"))


def test_magic_and_display_inside_a_function_do_nothing() -> None:
    cell = (
        "def f():\n    t = %timeit -o 1\n    %timeit 2\n    files = !ls\n    display(t)\n    return t, files"
    )
    assert load([cell], ["f"])[0]["f"]() == ([], [])


BROKEN_OFF = {
    "a benchmark that calls what is graded": "SIZES = []\nfor n in range(10**12):\n    SIZES.append(f(n))",
    "a call of a module": "for n in range(10**12):\n    math.exp(n)",
    "an assertion of a module's": "math.testing(f(1), 1)",
    "a slow experiment on a helper's cache": "for n in range(10**12):\n    helper(n)",
}


@pytest.mark.parametrize("name", BROKEN_OFF)
def test_an_experiment_costs_nothing_but_its_time(name) -> None:
    cells = [
        "import math\nCACHE = {}\ndef helper(n):\n    CACHE[n % 3] = n\n    return math.exp(0)",
        "def f(n=0): return helper(n)",
        BROKEN_OFF[name],
    ]
    namespace, notes = load(cells, ["f"], seconds=0.05)
    assert namespace["f"]() == 1
    broken = [note for note in notes if "was broken off: it ran for more than 0.02 s" in note]
    assert notes == broken and bool(broken) == ("helper" in name)


SET_UP = {
    "a function that sets a global": ("def init():\n    global T\n    T = 7\ninit()", "def f(): return T"),
    "a function that fills a table": ("T = {}\ndef init(n):\n    T[n] = 7\ninit(2)", "def f(): return T[2]"),
    "one that calls another": (
        "T = []\ndef inner(): T.append(7)\ndef outer(): inner()\nouter()",
        "def f(): return sum(T)",
    ),
    "singledispatch": (
        "from functools import singledispatch\n@singledispatch\ndef g(x): return 0",
        "@g.register\ndef _(x: int): return 7\n@g.register(str)\ndef _(x): return 8",
        "def f(): return g(1)",
    ),
    "a registry filled by a decorator": (
        "R = {}\ndef register(name):\n    def wrap(g):\n        R[name] = g\n        return g\n    return wrap",
        "@register('a')\ndef a(): return 7",
        "def f(): return R['a']()",
    ),
    "a registry filled by a call": (
        "R = {}\ndef register(name, g): R[name] = g\ndef a(): return 7",
        "for name in 'ab':\n    register(name, a)",
        "def f(): return R['b']()",
    ),
    "a limit of the interpreter": ("import sys\nsys.setrecursionlimit(4321)", "def f(): return deep(3000)",
                                   "def deep(n): return 7 if n == 0 else deep(n - 1)"),
    "a seed": (
        "import random as r\nSEED = 5\nr.seed(SEED)",
        "import random\ndef f(): return 7 if r.random() == random.Random(5).random() else 0",
    ),
    "a class over cells": (
        "class A:\n    def a(self): return 3", "class A(A):\n    def b(self): return 4",
        "def f(): return A().a() + A().b()",
    ),
    "methods given to a class later": (
        "class A: pass", "def b(self): return 7\nA.b = b", "setattr(A, 'c', lambda self: self.b())", "def f(): return A().c()",
    ),
    "methods given by a decorator": (
        "def add_to(C):\n    def wrap(g):\n        setattr(C, g.__name__, g)\n    return wrap\nclass A: pass",
        "@add_to(A)\ndef b(self): return 7",
        "def f(): return A().b()",
    ),
    "a function called as what was imported": ("from math import floor\ndef floor(x): return 7", "def f(): return floor(1)"),
}  # fmt: skip


@pytest.mark.parametrize("name", SET_UP)
def test_what_sets_up_a_function_is_run(name) -> None:
    limit = sys.getrecursionlimit()
    try:
        namespace, notes = load(SET_UP[name], ["f"])
        assert namespace["f"]() == 7 and not notes
    finally:
        sys.setrecursionlimit(limit)


def test_a_definition_that_takes_too_long_is_named() -> None:
    cells = ["import time\nT = time.sleep(60)", "def f(): return T"]
    notes = load(cells, ["f"], seconds=0.05)[1]
    assert notes == ["cell 1, line 2 was broken off: it ran for more than 0.05 s"]


def test_slow_definitions_have_a_time_together() -> None:
    slow = [f"import time\nT{n} = time.sleep(60)" for n in range(10)]
    cells = [*slow, "N = 7", f"def f(): return N, {', '.join(f'T{n}' for n in range(10))}"]
    namespace, notes = load(cells, ["f"], seconds=0.5)
    assert namespace["N"] == 7 and len(notes) == 10
    limits = [float(note.rpartition("than ")[2].removesuffix(" s")) for note in notes]
    assert limits[0] == 0.5 >= limits[1], (
        "the second has what the first, broken off on a busy machine, has left"
    )
    assert limits[2:] == [0.01] * 8


EXERCISES = ("01", "05", "10")
"""Exercises whose solutions are handed in: NumPy, a ring over virtual ranks, numbers of several precisions."""
Notebook = dict[str, Any]


def each_cell(change: Callable[[Notebook], None]) -> Callable[[Notebook], None]:
    def changed(notebook: Notebook) -> None:
        for cell in notebook["cells"]:
            change(cell)

    return changed


def as_format_4_0(notebook: Notebook) -> None:
    notebook["nbformat_minor"] = 0
    for cell in notebook["cells"]:
        cell.pop("id", None)
        cell["metadata"].setdefault("collapsed", False)


def as_colab(notebook: Notebook) -> None:
    """Colab keeps a cell's metadata, and adds its own."""
    notebook["metadata"] = {
        "colab": {"provenance": [], "toc_visible": True},
        "kernelspec": {"name": "python3", "display_name": "Python 3"},
        "accelerator": "GPU",
    }
    for number, cell in enumerate(notebook["cells"]):
        cell["metadata"] |= {
            "id": f"{number:012x}",
            "colab": {"base_uri": "https://localhost"},
            "outputId": "1",
        }
        cell["source"] = lines(cell)


def as_vs_code(notebook: Notebook) -> None:
    notebook["metadata"]["language_info"] = {"name": "python", "version": "3.11.9"}
    for number, cell in enumerate(notebook["cells"]):
        cell["metadata"] |= {"vscode": {"languageId": "python"}}
        cell["id"] = f"X{number:02}sZmlsZQ=="


def without_metadata(notebook: Notebook) -> None:
    notebook["metadata"] = {}
    each_cell(lambda cell: cell.update(metadata={}))(notebook)


def with_windows_ends(notebook: Notebook) -> None:
    each_cell(lambda cell: cell.update(source=text(cell).replace("\n", "\r\n")))(notebook)


def with_helper_cells(notebook: Notebook) -> None:
    """Cells of the learner's own before and after every cell: magics, tries, notes."""
    cells = []
    for cell in notebook["cells"]:
        own = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": 7}
        cells += [
            {**own, "source": "%load_ext autoreload\n%autoreload 2\nimport time\nbegin = time.time()"},
            cell,
            {**own, "source": "!ls\nfor n in range(3):\n    %timeit -n 1 n\nbegin?"},
            {"cell_type": "markdown", "metadata": {}, "source": "a note"},
        ]
    notebook["cells"] = cells


def in_one_cell_each(notebook: Notebook) -> None:
    """Every function in a cell of its own without a mark, and the marked cells call them by a class over cells."""
    cells = []
    for cell in notebook["cells"]:
        source = text(cell)
        name = re.search(r"^def (\w+)\(", source, re.MULTILINE)
        if cell["cell_type"] == "code" and cell["metadata"].get("grade") and name:
            plain = {"cell_type": "code", "outputs": [], "execution_count": None}
            own = f"class Written_{name[1]}:\n    pass"
            given = f"Written_{name[1]}.call = staticmethod({name[1]})"
            call = f"def {name[1]}(*args, **kwargs):\n    return Written_{name[1]}.call(*args, **kwargs)"
            cells += [{**plain, "metadata": {}, "source": part} for part in (source, own, given)]
            cells.append({**cell, "source": call})
        else:
            cells.append(cell)
    notebook["cells"] = cells


FORMATS = {
    "nbformat 4.0": as_format_4_0,
    "Colab": as_colab,
    "VS Code": as_vs_code,
    "no metadata": without_metadata,
    "CRLF": with_windows_ends,
    "helper cells": with_helper_cells,
    "classes over cells": in_one_cell_each,
    "source as lines": each_cell(lambda cell: cell.update(source=lines(cell))),
    "no ids": each_cell(lambda cell: cell.pop("id", None)),
    "a mark of byte order": lambda notebook: None,
}


def text(cell: Notebook) -> str:
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def lines(cell: Notebook) -> list[str]:
    return text(cell).splitlines(keepends=True)


@functools.cache
def solution(exercise: str) -> tuple[str, Notebook]:
    (path,) = (find_checkout() / "solutions").glob(f"{exercise}_*.ipynb")
    return path.name, json.loads(path.read_text(encoding="utf-8"))


def handed_in(folder: Path, name: str, notebook: Notebook, mark: bool = False) -> Submission:
    (folder / name).write_bytes(b"\xef\xbb\xbf" * mark + json.dumps(notebook).encode())
    return read_submission(folder / name)


def earned(exercise: str, submission: Submission) -> dict[str, int]:
    """Return what a submission earns in the visible checks, by stage."""
    stages = load_exercise(exercise).stages
    names = [name for stage in stages for name in (stage.function, *stage.helpers)]
    space, _ = load(submission.code, names)
    return {stage.id: run_in_process(stage, space).earned for stage in stages}


def visible_points(exercise: str) -> dict[str, int]:
    stages = load_exercise(exercise).stages
    return {stage.id: sum(c.points for c in stage.checks if c.tier == "visible") for stage in stages}


@pytest.mark.parametrize("exercise", EXERCISES)
def test_a_notebook_that_is_saved_by_another_program_earns_what_it_earned(tmp_path, exercise) -> None:
    name, notebook = solution(exercise)
    before = handed_in(tmp_path, name, notebook)
    for kind, change in FORMATS.items():
        changed = copy.deepcopy(notebook)
        change(changed)
        after = handed_in(tmp_path, name, changed, mark=kind == "a mark of byte order")
        assert (after.exercise or exercise_of(tmp_path / name)) == exercise, kind
        if after.code != before.code:  # the same code earns the same
            assert earned(exercise, after) == visible_points(exercise), kind
