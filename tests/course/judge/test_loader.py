"""Whatever 32 MiB of JSON hold, reading them takes seconds and less than a gigabyte: both ended by the kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab_course.judge import submission
from ringlab_course.judge.loader import load
from ringlab_course.judge.submission import FILE_BYTES, UnreadableError, read_submission
from tests.course.judge.small_contract import notebook


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
    "cell", ["%%writefile f.py\ndef f(): pass", "%%timeit\ndef f(): pass", "\n%%bash\ndef f(): pass"]
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


GOOD = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}


def written(tmp_path, content) -> str:
    path = tmp_path / "n.ipynb"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_cells_and_exercise_are_read(tmp_path) -> None:
    submission = read_submission(notebook(tmp_path, "import torch", "def f(): pass", grade="05.forward"))
    assert submission.exercise == "05" and submission.mentions_torch
    assert submission.code == ["import torch", "def f(): pass"]


def test_lines_are_joined_and_other_cells_keep_their_place(tmp_path) -> None:
    cells = [{"cell_type": "markdown", "source": "torch"}, {"cell_type": "code", "source": ["a\n", "b"]}]
    submission = read_submission(written(tmp_path, {**GOOD, "cells": cells}))
    assert submission.code == ["", "a\nb"] and submission.exercise is None and not submission.mentions_torch


BAD = {
    "nothing": b"",
    "broken JSON": b'{"cells": [',
    "deep JSON": b'{"cells":' + b"[" * 100_000,
    "UTF-16": json.dumps(GOOD).encode("utf-16"),
    "Latin-1": '{"cells": ["é"]}'.encode("latin-1"),
    "a list": [],
    "no cells": {**GOOD, "cells": None},
    "format 3": {**GOOD, "nbformat": 3, "worksheets": []},
    "no format": {"cells": []},
    "format that cannot be shown": {**GOOD, "nbformat": "\ud800"},
    "cell no object": {**GOOD, "cells": [1]},
    "source no text": {**GOOD, "cells": [{"cell_type": "code", "source": 5}]},
    "source of numbers": {**GOOD, "cells": [{"cell_type": "code", "source": [5]}]},
    "too many cells": {**GOOD, "cells": [{}] * 6000},
    "too much code": {**GOOD, "cells": [{"cell_type": "code", "source": "x" * (1 << 20)}]},
    "lone surrogate": b'{"nbformat":4,"cells":[{"cell_type":"code","source":"\\ud800"}]}',
    "endless number": b'{"nbformat":' + b"4" * 10_000 + b',"cells":[]}',
}


@pytest.mark.parametrize("name", BAD)
def test_foreign_files_are_refused_with_a_reason(tmp_path, name) -> None:
    with pytest.raises(UnreadableError) as error:
        read_submission(written(tmp_path, BAD[name]))
    assert error.value.got and str(error.value).encode("utf-8")


def test_links_directories_pipes_and_large_files_are_refused(tmp_path) -> None:
    good = written(tmp_path, GOOD)
    (tmp_path / "link.ipynb").symlink_to(good)
    (tmp_path / "folder.ipynb").mkdir()
    os.mkfifo(tmp_path / "pipe.ipynb")
    with open(tmp_path / "large.ipynb", "wb") as file:
        file.truncate(1 << 34)  # sparse
    for name, reason in (
        ("link", "symbolic link"),
        ("folder", "no file"),
        ("pipe", "no file"),
        ("large", "MiB"),
        ("none", "cannot be opened"),
    ):
        with pytest.raises(UnreadableError, match=reason):
            read_submission(tmp_path / f"{name}.ipynb")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["cells", "source", "metadata", "cell_type", "grade", "ringlab", "exercise", "nbformat"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(json_values, st.lists(json_values, max_size=3))
def test_any_json_is_cells_or_a_reason(tmp_path_factory, document, cells) -> None:
    folder = tmp_path_factory.mktemp("any")
    for content in (document, {**GOOD, "cells": cells}, {**GOOD, "metadata": document, "cells": []}):
        try:
            submission = read_submission(written(folder, content))
        except UnreadableError:
            continue
        assert all(isinstance(source, str) for source in submission.code)


CPU_SECONDS, MEMORY = 10, 1 << 30
N = FILE_BYTES - 64
HEAD = b'{"nbformat":4,"cells":[],"x":['


def filled(unit: bytes, count: int = N, head: bytes = HEAD, tail: bytes = b"0]}") -> bytes:
    return head + unit * min(count, (N - len(head) - len(tail)) // len(unit)) + tail


# What the reader must not even begin to take apart: the parsed file would be fifty times as large.
TOO_MANY = {
    "brackets": lambda: b'{"cells":' + b"[" * N,
    "empty lists": lambda: filled(b"[],"),
    "empty objects": lambda: filled(b"{},"),
    "objects of one": lambda: filled(b'{"":0},'),
    "nested objects": lambda: filled(b'{"":' * 900 + b"0" + b"}" * 900 + b","),
    "two letters": lambda: filled(b'"ab",'),
    "decimals": lambda: filled(b"1.1,"),
    "lines of code": lambda: filled(b'"",', head=b'{"nbformat":4,"cells":[{"source":[', tail=b'""]}]}'),
    "a format of numbers": lambda: filled(b"1,", head=b'{"cells":[],"nbformat":['),
}
# The most that passes the counts, of each kind.
JUST_SO = {
    "objects of one": lambda: filled(b'{"":0},', 400_000),
    "nested objects": lambda: filled(b'{"":' * 900 + b"0" + b"}" * 900 + b",", 500),
    "other letters": lambda: filled('"ä\U0001f600",'.encode(), 3_900_000),
    "decimals": lambda: filled(b"1.1,", 3_900_000),
    "long integers": lambda: filled(b"9" * 4300 + b","),
    "a number of megabytes": lambda: b'{"nbformat":4,"cells":[],"x":' + b"1" * (N - 40) + b".5}",
    "an exponent of megabytes": lambda: b'{"nbformat":4,"cells":[],"x":1e' + b"1" * (N - 40) + b"}",
    "text of four bytes each": lambda: HEAD + b'"' + "\U0001f600".encode() * (N // 4 - 20) + b'"]}',
    "escaped text": lambda: HEAD + b'"' + b"\\u0000" * (N // 6 - 20) + b'"]}',
    "escaped code": lambda: b'{"nbformat":4,"cells":[{"cell_type":"code","source":"' + b"\\u0001" * (N // 6 - 40) + b'"}]}',
    "the same key": lambda: filled(b'"aaaaaaaa":0,', head=b'{"nbformat":4,"cells":[],"x":{', tail=b'"z":0}}'),
    "white space": lambda: b'{"nbformat":4,' + b" " * (N - 40) + b'"cells":[]}',
}  # fmt: skip
CHILD = """
import re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2])))
sys.path.insert(0, sys.argv[3])
from ringlab_course.judge.submission import UnreadableError, read_submission
try:
    read_submission(sys.argv[1])
except UnreadableError:
    pass
print(int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024)
"""


@pytest.mark.parametrize("name", TOO_MANY)
def test_a_file_of_too_many_parts_is_refused_unread(tmp_path, monkeypatch, name) -> None:
    path = tmp_path / "n.ipynb"
    path.write_bytes(TOO_MANY[name]())
    monkeypatch.setattr(submission.json, "loads", None)
    with pytest.raises(UnreadableError, match="too many small parts"):
        read_submission(path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", JUST_SO)
def test_what_may_be_read_stays_within_its_bounds(tmp_path, name) -> None:
    path = tmp_path / "n.ipynb"
    path.write_bytes(JUST_SO[name]())
    root = str(Path(submission.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(CPU_SECONDS), root], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MEMORY


def test_large_honest_notebooks_are_read(tmp_path) -> None:
    picture, table = b"A" * (8 << 20), b"[" + b"0.12345678," * 1_000_000 + b"0]"
    path = tmp_path / "n.ipynb"
    path.write_bytes(
        b'{"nbformat":4,"metadata":{},"cells":[{"cell_type":"code","source":"x = 1","metadata":{},"outputs":['
        b'{"data":{"image/png":"' + picture + b'","application/json":' + table + b"}}]}]}"
    )
    assert read_submission(path).code == ["x = 1"]


@pytest.mark.parametrize("form", ["[" * 980 + "]" * 980, '{"a":' * 980 + "1" + "}" * 980, "4" * 4299])
def test_a_strange_format_is_named_briefly(tmp_path, form) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(f'{{"cells":[],"nbformat":{form}}}')
    with pytest.raises(UnreadableError) as error:
        read_submission(path)
    assert len(error.value.got) < 60
