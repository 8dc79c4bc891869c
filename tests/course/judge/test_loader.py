"""The loader runs only the cells that define the graded functions and their setup.

So an error in another cell, where learners experiment, costs no points.
"""

from __future__ import annotations

import sys

import pytest

from ringlab_course.judge.loader import load


@pytest.fixture(autouse=True)
def own_main(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def names(namespace: dict) -> set[str]:
    return {name for name in namespace if not name.startswith("__")}


def test_only_what_the_function_needs_runs() -> None:
    cells = [
        "import math\nimport os\nraise SystemExit",
        "SCALE = math.sqrt(4)\nUNUSED = 1 / 0",
        "def helper(x):\n    return SCALE * x",
        "def graded(x):\n    y = helper(x)\n    return y",
        "y = graded(3)\nprint(y)\ncheck('01.graded')",
    ]
    namespace, notes = load(cells, ["graded"])
    assert namespace["graded"](3) == 6 and not notes
    assert names(namespace) == {"math", "SCALE", "helper", "graded"}


def test_statements_that_build_a_needed_table_run() -> None:
    cells = [
        "TABLE = {}\nfor n in range(3):\n    TABLE[n] = n * n\nLIST = []\nLIST.append(7)",
        "def f(n):\n    return TABLE[n] + LIST[0]",
    ]
    assert load(cells, ["f"])[0]["f"](2) == 11


def test_the_last_definition_counts_and_a_wrapped_one_keeps_its_first() -> None:
    assert load(["def f(): return 1", "def f(): return 2"], ["f"])[0]["f"]() == 2
    assert load(["def f(): return 1", "g = f\ndef f(): return g() + 1"], ["f"])[0]["f"]() == 2


def test_magic_broken_and_missing_code_is_named() -> None:
    cells = ["%%bash\nls", "def f(:", "x = !rm -rf /", "def g(): return later()"]
    namespace, notes = load(cells, ["f", "g"])
    assert "g" in namespace and "x" not in namespace
    assert [n.split(":")[0] for n in notes] == [
        "cell 1 was not run",
        "cell 2 was not run",
        "no code cell defines the function f",
    ]
    assert "magic or shell" in notes[0] and "SyntaxError" in notes[1]


@pytest.mark.parametrize(
    "cell", ["%%time\ndef f():\n    return __LINE__()", "!pip list\ndef f():\n    return 1\n%who"]
)
def test_what_a_notebook_alone_understands_is_left_out_and_the_lines_keep_their_numbers(cell) -> None:
    namespace, notes = load([cell], ["f"])
    assert namespace["f"].__code__.co_firstlineno == 2
    assert notes[0] == "cell 1 was run without line 1, a magic or shell line"


@pytest.mark.parametrize(
    "cell",
    [
        "%%writefile f.py\ndef f(): pass",
    ],
)
def test_a_cell_of_another_language_is_left_out_whole(cell) -> None:
    assert "f" not in load([cell], ["f"])[0]


def test_a_cell_that_raises_leaves_the_others() -> None:
    namespace, notes = load(["A = 1 / 0", "B = 2", "def f(): return A, B"], ["f"])
    assert "B" in namespace and "cell 1, which defines A: ZeroDivisionError" in notes[0]


def test_future_annotations_and_dataclasses_work() -> None:
    cells = [
        "from __future__ import annotations",
        "from dataclasses import dataclass\n@dataclass\nclass Pair:\n    a: Nowhere\n",
        "def f(x: Missing): return Pair(x).a",
    ]
    namespace, notes = load(cells, ["f"])
    assert not notes and namespace["f"](4) == 4


def test_global_statements_and_star_imports_count() -> None:
    assert (
        load(
            [
                "def init():\n    global COUNT\n    COUNT = 5",
                "from math import *",
                "def f(): init(); return COUNT + floor(2.5)",
            ],
            ["f"],
        )[0]["f"]()
        == 7
    )


@pytest.mark.parametrize(
    "source",
    [
        "(" * 5000,
        "\0",
    ],
)
def test_source_that_upsets_parsers_is_a_note(source) -> None:
    namespace, notes = load([source, "def f(): return 1"], ["f"])
    assert namespace["f"]() == 1 and len(notes) <= 1


COMMANDS = {
    "indented magic": "for n in range(3):\n    %timeit n",
    "kept result": "t = %timeit -o -n 1 1",
    "help": "math.exp?",
    "shell output": "files = !ls\nfirst, *rest = !ls",
    "blank line before a cell's magic": "\n\n%%time",
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


def test_magic_and_display_inside_a_function_do_nothing() -> None:
    cell = (
        "def f():\n    t = %timeit -o 1\n    %timeit 2\n    files = !ls\n    display(t)\n    return t, files"
    )
    assert load([cell], ["f"])[0]["f"]() == ([], [])


BROKEN_OFF = {
    "a benchmark that calls what is graded": "SIZES = []\nfor n in range(10**12):\n    SIZES.append(f(n))",
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
    "a seed": (
        "import random as r\nSEED = 5\nr.seed(SEED)",
        "import random\ndef f(): return 7 if r.random() == random.Random(5).random() else 0",
    ),
    "a class over cells": (
        "class A:\n    def a(self): return 3", "class A(A):\n    def b(self): return 4",
        "def f(): return A().a() + A().b()",
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
        "on a busy machine the first definition may leave some time to the second"
    )
    assert limits[2:] == [0.01] * 8
