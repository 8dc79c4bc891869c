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
    assert "g" in namespace
    assert [n.split(":")[0] for n in notes] == [
        "cell 1 was not run",
        "cell 2 was not run",
        "cell 3 was not run",
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
    "cell", ["%%writefile f.py\ndef f(): pass", "%%timeit\ndef f(): pass", "x = \\\n!ls\ndef f(): pass"]
)
def test_a_cell_of_another_language_is_left_out_whole(cell) -> None:
    assert "f" not in load([cell], ["f"])[0]


@pytest.mark.parametrize("command", ["", "!ls\n", "%who\n"])
def test_a_remainder_at_the_beginning_of_a_line_is_no_magic(command) -> None:
    cell = f'X = (7\n% 4)\n{command}TEXT = """\n%who"""\ndef f(): return X, TEXT'
    assert load([cell], ["f"])[0]["f"]() == (3, "\n%who")


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


def test_annotations_are_evaluated_where_the_notebook_does_so() -> None:
    assert "NameError" in load(["def f(x: Missing): return x"], ["f"])[1][0]


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
    "source", ["(" * 5000, "x" + ".a" * 20000, "-" * 50000 + "1", "\0", "a = '" + "\\" * 9]
)
def test_source_that_upsets_parsers_is_a_note(source) -> None:
    namespace, notes = load([source, "def f(): return 1"], ["f"])
    assert namespace["f"]() == 1 and len(notes) <= 1
