from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab_course.judge.submission import UnreadableError, read_submission
from tests.course.judge.small_contract import notebook

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
