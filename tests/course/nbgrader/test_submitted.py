"""nbgrader gets a submission with the learner's code, and with the released text in all other cells."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab_course.builder.sources import targets
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.judge.submission import read_submission
from ringlab_course.nbgrader.course import source_notebook
from ringlab_course.nbgrader.submitted import Known, check_id, read, solution_id

CHECKOUT = Path(__file__).resolve().parents[3]
SOLUTION = Known("05-step", "code", "def ring_step(): ...", "abc", solution=True, stage="05.step")
POINTS = Known(
    "05-step-check", "code", 'check("05.step")', "def", grade=True, locked=True, points=8.0, stage="05.step"
)
ESSAY = Known("essay", "markdown", "YOUR ANSWER HERE", "ghi", grade=True, solution=True, points=3.0)
KNOWN = [SOLUTION, POINTS, ESSAY]


def written(folder: Path, *cells: dict[str, Any]) -> Path:
    path = folder / "x.ipynb"
    document = {"cells": list(cells), "nbformat": 4, "nbformat_minor": 5, "metadata": {}}
    path.write_text(json.dumps(document))
    return path


def cell(source: str, kind: str = "code", **metadata: Any) -> dict[str, Any]:
    return {"cell_type": kind, "source": source, "metadata": metadata}


def ids(notebook: nbformat.NotebookNode) -> list[str]:
    return [each.metadata.get("nbgrader", {}).get("grade_id", "") for each in notebook.cells]


def test_the_names_are_those_of_the_built_exercises() -> None:
    """nbgrader's cells are found by the names that the builder gives to the cells."""
    for exercise in map(load_exercise, exercise_ids()):
        built = nbformat.read(CHECKOUT / "exercises" / f"{exercise.slug}.ipynb", as_version=4)
        marks = [c.metadata["nbgrader"] for c in built.cells if "nbgrader" in c.metadata]
        assert {m["grade_id"]: m["points"] for m in marks if m["grade"]} == {
            check_id(stage.id): stage.points for stage in exercise.stages
        }
        assert {m["grade_id"] for m in marks if m["solution"]} == {solution_id(s.id) for s in exercise.stages}


def test_every_solution_stands_between_nbgraders_marks() -> None:
    """Every solution is between nbgrader's marks; otherwise nbgrader clears the whole cell, or refuses it."""
    for target in targets(CHECKOUT, tuple(f"solutions/{number}" for number in exercise_ids())):
        if target.kind != "solution":
            continue
        source = source_notebook(target, CHECKOUT)
        for each in source.cells:
            if "grade" in each.metadata:
                assert each.source.count("### BEGIN SOLUTION") == each.source.count("### END SOLUTION") > 0
                assert each.source.count("# To write: ") == each.source.count("### BEGIN SOLUTION")
            else:
                assert "SOLUTION" not in each.source
        plain = [c.source for c in source.cells if "grade" not in c.metadata]
        exercise = nbformat.read(CHECKOUT / "exercises" / target.path.name, as_version=4)
        assert plain == [c.source for c in exercise.cells if "grade" not in c.metadata]


@pytest.mark.parametrize(
    "evil",
    [
        "<script>alert(1)</script>",
        "```\n<b>",
    ],
)
def test_text_that_is_not_the_courses_is_shown_letter_by_letter(tmp_path: Path, evil: str) -> None:
    path = written(tmp_path, cell(evil, "markdown"), cell("# Ours", "markdown"), cell(evil, "raw"))
    first, ours, raw = read(path, [], released=["# Ours"]).cells
    fence = first.source.splitlines()[0].removesuffix("text")
    assert set(fence) == {"`"} and fence not in evil and first.source == f"{fence}text\n{evil}\n{fence}"
    assert ours.source == "# Ours" and raw == first | {"id": raw.id}


@pytest.mark.parametrize("data", [b"{", b'{"cells": 1, "nbformat": 4}'])
def test_what_is_no_notebook_has_every_graded_cell_and_a_reason(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.ipynb"
    path.write_bytes(data)
    notebook = read(path, KNOWN)
    assert "cannot be read" in notebook.cells[0].source
    assert ids(notebook)[1:] == ["05-step-check", "essay"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    secret = written(tmp_path, cell("secret"))
    os.symlink(secret, tmp_path / "link.ipynb")
    assert "secret" not in nbformat.writes(read(tmp_path / "link.ipynb", KNOWN))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["nbgrader", "grade", "grade_id", "solution", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
CELL = st.fixed_dictionaries(
    {
        "cell_type": st.sampled_from(["code", "markdown", "raw", 3]),
        "source": st.text(max_size=20) | st.just(["a", "b"]),
    },
    optional={
        "metadata": JSON
        | st.just({"nbgrader": {"grade_id": "05-step-check"}})
        | st.just({"grade": "05.step"})
    },
)


@given(st.lists(CELL, max_size=6))
def test_whatever_the_cells_claim_each_graded_cell_is_there_once_and_the_notebook_is_valid(
    tmp_path_factory: pytest.TempPathFactory, cells: list[dict[str, Any]]
) -> None:
    path = written(tmp_path_factory.mktemp("any"), *cells)
    notebook = read(path, KNOWN)
    nbformat.validate(notebook)
    nbformat.writes(notebook).encode()
    graded = [c.metadata["nbgrader"] for c in notebook.cells if c.metadata.get("nbgrader", {}).get("grade")]
    assert sorted(m["grade_id"] for m in graded) == ["05-step-check", "essay"]
    assert all(m["schema_version"] == 3 for m in graded)
    code = [c.source for c in notebook.cells if c.cell_type == "code" and c.source != POINTS.source]
    handed_in = read_submission(path)
    kept = [c.source for c in handed_in.cells if c.code]
    assert Counter(code) <= Counter(kept)  # no code is invented
