"""Reading a notebook takes bounded time and memory, and a notebook earns the same whichever program saved it.

Reading 32 MiB of any JSON takes a few seconds and less than a gigabyte. The tests set limits by which the
kernel ends a reader that takes more.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.checkout import find_checkout
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.reports import run_in_process
from ringlab_course.judge import submission
from ringlab_course.judge.loader import load
from ringlab_course.judge.submission import (
    FILE_BYTES,
    Submission,
    UnreadableError,
    exercise_of,
    read_submission,
)
from tests.course.judge.small_contract import notebook


@pytest.fixture(autouse=True)
def own_main(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


GOOD = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}


def written(tmp_path, content) -> str:
    path = tmp_path / "n.ipynb"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_cells_and_exercise_are_read(tmp_path) -> None:
    read = read_submission(notebook(tmp_path, "import torch", "def f(): pass", grade="05.forward"))
    assert read.exercise == "05" and read.mentions_torch
    assert read.code == ["import torch", "def f(): pass"]


def test_lines_are_joined_and_other_cells_keep_their_place(tmp_path) -> None:
    cells = [{"cell_type": "markdown", "source": "torch"}, {"cell_type": "code", "source": ["a\n", "b"]}]
    read = read_submission(written(tmp_path, {**GOOD, "cells": cells}))
    assert read.code == ["", "a\nb"] and read.exercise is None and not read.mentions_torch


BAD = {
    "nothing": b"",
    "broken JSON": b'{"cells": [',
    "deep JSON": b'{"cells":' + b"[" * 100_000,
    "UTF-16": json.dumps(GOOD).encode("utf-16"),
    "no cells": {**GOOD, "cells": None},
    "format 3": {**GOOD, "nbformat": 3, "worksheets": []},
    "source of numbers": {**GOOD, "cells": [{"cell_type": "code", "source": [5]}]},
    "too many cells": {**GOOD, "cells": [{}] * 6000},
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
        ("folder", "not a file"),
        ("pipe", "not a file"),
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
            read = read_submission(written(folder, content))
        except UnreadableError:
            continue
        assert all(isinstance(source, str) for source in read.code)


CPU_SECONDS, MEMORY = 10, 1 << 30
N = FILE_BYTES - 64
HEAD = b'{"nbformat":4,"cells":[],"x":['


def filled(unit: bytes, count: int = N, head: bytes = HEAD, tail: bytes = b"0]}") -> bytes:
    return head + unit * min(count, (N - len(head) - len(tail)) // len(unit)) + tail


# Files that the reader must refuse before it parses them, because their parsed form is fifty times as large.
TOO_MANY = {
    "brackets": lambda: b'{"cells":' + b"[" * N,
    "nested objects": lambda: filled(b'{"":' * 900 + b"0" + b"}" * 900 + b","),
    "decimals": lambda: filled(b"1.1,"),
    "lines of code": lambda: filled(b'"",', head=b'{"nbformat":4,"cells":[{"source":[', tail=b'""]}]}'),
}
# For each kind of file, the largest one with few enough brackets and commas to be parsed.
JUST_SO = {
    "nested objects": lambda: filled(b'{"":' * 900 + b"0" + b"}" * 900 + b",", 500),
    "decimals": lambda: filled(b"1.1,", 3_900_000),
    "a number of megabytes": lambda: b'{"nbformat":4,"cells":[],"x":' + b"1" * (N - 40) + b".5}",
    "escaped code": lambda: b'{"nbformat":4,"cells":[{"cell_type":"code","source":"' + b"\\u0001" * (N // 6 - 40) + b'"}]}',
    "the same key": lambda: filled(b'"aaaaaaaa":0,', head=b'{"nbformat":4,"cells":[],"x":{', tail=b'"z":0}}'),
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


EXERCISES = ("01",)
"""Exercises whose solutions are handed in: one in NumPy, a ring over virtual ranks, several precisions."""
Notebook = dict[str, Any]


def each_cell(change: Callable[[Notebook], None]) -> Callable[[Notebook], None]:
    def changed(notebook: Notebook) -> None:
        for cell in notebook["cells"]:
            change(cell)

    return changed


def as_colab(notebook: Notebook) -> None:
    """Change a notebook as Colab does, which keeps the metadata of cells and adds more."""
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


def without_metadata(notebook: Notebook) -> None:
    notebook["metadata"] = {}
    each_cell(lambda cell: cell.update(metadata={}))(notebook)


def with_windows_ends(notebook: Notebook) -> None:
    each_cell(lambda cell: cell.update(source=text(cell).replace("\n", "\r\n")))(notebook)


def with_helper_cells(notebook: Notebook) -> None:
    """Add a learner's own cells before and after every cell: magics, experiments, notes."""
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


FORMATS = {
    "Colab": as_colab,
    "no metadata": without_metadata,
    "CRLF": with_windows_ends,
    "helper cells": with_helper_cells,
    "source as lines": each_cell(lambda cell: cell.update(source=lines(cell))),
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
    """Return the points that a submission earns in each stage's visible checks."""
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
        if after.code != before.code:  # equal code earns equal points
            assert earned(exercise, after) == visible_points(exercise), kind
