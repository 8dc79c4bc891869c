"""The builder makes the same notebooks byte for byte, and overwrites no notebook that somebody has edited."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from ringlab.cli import app
from ringlab.errors import CourseError
from ringlab_course.builder import build as builder
from ringlab_course.builder import execution, sources
from ringlab_course.builder.build import find_root
from ringlab_course.notebook.predictions import ROOM
from tests.course.submissions_of import lesson_source, small_course

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def as_in_ci(monkeypatch):
    """Run as in CI, where nobody works in the exercises, so that every difference is drift."""
    monkeypatch.setenv("CI", "true")


@pytest.fixture(scope="module")
def built_once(tmp_path_factory):
    root = small_course(tmp_path_factory.mktemp("a course with spaces"))
    results = builder.build(root=root)
    assert [r.action for r in results] == ["written"] * 3, results
    return root


@pytest.fixture
def course(built_once, tmp_path):
    """Return the root of a copy of the built course, which a test may change."""
    import shutil

    return Path(shutil.copytree(built_once, tmp_path / "course"))


def edit(path, change):
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    nbformat.write(notebook, path)


def test_a_second_build_gives_the_same_bytes(course):
    before = {path: path.read_bytes() for path in course.rglob("*.ipynb")}
    assert len(before) == 3
    assert {r.action for r in builder.build(root=course)} == {"unchanged"}
    for path in before:
        path.unlink()
    builder.build(root=course)
    assert {path: path.read_bytes() for path in course.rglob("*.ipynb")} == before


def test_nothing_of_the_run_is_left_in_the_file(built_once):
    lesson = (built_once / "notebooks" / "91_small.ipynb").read_text()
    for volatile in ("iopub", "matplotlib version", "Software", "widget-view", "a course with spaces"):
        assert volatile not in lesson
    notebook = json.loads(lesson)
    assert "version" not in notebook["metadata"]["language_info"]
    printed = notebook["cells"][2]["outputs"]
    assert printed[0]["text"] == ["one\n", "two\n"] and printed[1]["data"]["text/plain"] == ["2"]
    assert [c["execution_count"] for c in notebook["cells"] if c["cell_type"] == "code"] == list(range(1, 8))


def test_a_predict_cell_is_recorded_in_its_static_form_and_without_a_guess(built_once):
    cells = json.loads((built_once / "notebooks" / "91_small.ipynb").read_text())["cells"]
    asked = cells[3]["outputs"][0]["data"]
    assert "( ) 2" in "".join(asked["text/plain"])
    assert f"height: {ROOM}" in "".join(asked["text/html"]) and "( ) 2" in "".join(asked["text/html"])
    assert cells[4]["outputs"][0]["text"] == ["measured: 2 (no prediction was made)\n"]


def test_the_skeleton_is_the_solution_without_what_was_filled_in(built_once):
    skeleton, solution = (
        nbformat.read(built_once / folder / "91_small.ipynb", as_version=4)
        for folder in ("exercises", "solutions")
    )
    kept = [c for c in solution.cells if sources.SOLUTION_ONLY not in c.metadata.get("tags", [])]
    assert len(kept) == len(solution.cells) - 1
    emptied = [sources.skeleton(c.source, c.metadata.get("grade", "")) for c in kept]
    assert emptied == [c.source for c in skeleton.cells]
    assert 'raise NotImplementedError("91.double: return twice x")' in skeleton.cells[2].source
    assert "y = x + x" in solution.cells[2].source and "y = x + x" not in skeleton.cells[2].source
    assert not any(c.get("outputs") for c in skeleton.cells)


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    # BEGIN SOLUTION a\n    pass",
        "def f():\n    # BEGIN SOLUTION a\n    # BEGIN SOLUTION b\n    # END SOLUTION",
    ],
)
def test_a_malformed_solution_region_is_an_error(source):
    with pytest.raises(CourseError, match="SOLUTION"):
        sources.skeleton(source)


def test_a_built_course_has_no_drift(course):
    assert all(r.ok for r in builder.check(root=course))
    assert all(r.ok for r in builder.check(root=course, rerun=True))


def spoil_skeleton(course):
    path = course / "exercises" / "91_small.ipynb"
    edit(path, lambda n: n.cells[2].update(source="def double(x):\n    return 2 * x"))
    return "exercises/91_small.ipynb", "cell 3 ('def double(x):'): its source"


def spoil_output(course):
    path = course / "notebooks" / "91_small.ipynb"
    edit(path, lambda n: n.cells[2].outputs[0].update(text="one\nthree\n"))
    return "notebooks/91_small.ipynb", "outputs"


def spoil_id(course):
    path = course / "exercises" / "91_small.ipynb"
    edit(path, lambda n: n.cells[1].update(id="another"))
    return "exercises/91_small.ipynb", "its id differs"


def spoil_by_deleting(course):
    (course / "solutions" / "91_small.ipynb").unlink()
    return "solutions/91_small.ipynb", "not built yet"


SPOILERS = [v for name, v in sorted(globals().items()) if name.startswith("spoil_")]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_drift_is_found_and_named(course, spoil):
    path, message = spoil(course)
    bad = [r for r in builder.check(root=course) if not r.ok]
    assert [r.path.relative_to(course).as_posix() for r in bad] == [path]
    assert bad[0].action == "drift" and message in bad[0].message


def test_outputs_that_are_no_longer_given_are_found_by_a_rerun(course):
    path = course / "notebooks" / "91_small.ipynb"

    def as_if_recorded(notebook):
        notebook.cells[2].outputs[0].update(text="one\nthree\n")
        notebook.metadata["ringlab"]["outputs"] = sources.outputs_hash(notebook)

    edit(path, as_if_recorded)
    assert all(r.ok for r in builder.check(root=course))  # without running cells, this is not found
    bad = [r for r in builder.check(root=course, rerun=True) if not r.ok]
    assert len(bad) == 1 and "cell 3" in bad[0].message and "another output" in bad[0].message


@pytest.mark.parametrize("folder", ["exercises", "notebooks", "solutions"])
def test_an_edited_notebook_is_never_written_over(course, folder):
    path = course / folder / "91_small.ipynb"
    edit(path, lambda n: n.cells[2].update(source="mine = True"))
    before = path.read_bytes()
    results = {r.path: r for r in builder.build(root=course)}
    assert path.read_bytes() == before
    assert results[path].action == "refused" and "left alone" in results[path].message
    assert sum(r.ok for r in results.values()) == 2  # the other notebooks are still built
    if folder == "exercises":
        assert "ringlab exercise fresh 91" in results[path].message


def test_work_in_an_exercise_is_no_drift_but_in_ci(course, monkeypatch):
    edit(course / "exercises" / "91_small.ipynb", lambda n: n.cells[2].update(source="mine = True"))
    monkeypatch.delenv("CI", raising=False)
    (result,) = builder.check(["exercises/91"], root=course)
    assert result.ok and result.action == "edited"
    monkeypatch.setenv("CI", "true")
    (result,) = builder.check(["exercises/91"], root=course)
    assert result.action == "drift"


def test_a_fresh_exercise_keeps_the_edited_one_beside_it(course):
    path = course / "exercises" / "91_small.ipynb"
    original = path.read_bytes()
    for count in (1, 2):
        edit(path, lambda n, count=count: n.cells[2].update(source=f"mine = {count}"))
        mine = path.read_bytes()
        written, aside = builder.fresh("91", root=course)
        assert written == path and path.read_bytes() == original
        assert (
            aside is not None and aside.name == f"91_small.mine-{count}.ipynb" and aside.read_bytes() == mine
        )
    assert builder.fresh("91", root=course) == (path, None)


def test_a_cell_that_raises_fails_the_build_and_writes_nothing(course):
    source = lesson_source(course)
    source.write_text(source.read_text().replace("1 + 1", "1 / 0"))
    before = (course / "notebooks" / "91_small.ipynb").read_bytes()
    (result,) = builder.build(["notebooks/91"], root=course)
    assert result.action == "failed" and "ZeroDivisionError" in result.message
    assert (course / "notebooks" / "91_small.ipynb").read_bytes() == before


def test_notebooks_of_another_checkout_are_refused(tmp_path, monkeypatch):
    """Notebooks of another checkout are refused; otherwise this checkout's sources would be compared with them."""
    for name in ("lessons", "builder"):
        (tmp_path / "ringlab_course" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CourseError, match=re.escape(f"run {tmp_path / '.venv/bin/ringlab'}")):
        find_root()


def test_the_command_line_tells_and_sets_the_status(course, monkeypatch):
    def build(*arguments):
        result = CliRunner().invoke(app, ["build", *arguments])
        return result.exit_code, result.output

    monkeypatch.chdir(course)
    assert build("--check")[0] == 0
    message = spoil_skeleton(course)[1]
    status, told = build("--check")
    assert status == 1 and message in told
    status, told = build("92")
    assert status == 1 and "needed" in told


def test_a_kernel_takes_no_port_that_somebody_else_could_take_first(tmp_path):
    """A kernel takes no TCP port, because two builds at once could draw the same one before their kernels start."""
    notebook = nbformat.v4.new_notebook(metadata=dict(sources.METADATA))
    told = "from ipykernel.kernelapp import IPKernelApp\nprint(IPKernelApp.instance().transport)"
    notebook.cells = [nbformat.v4.new_code_cell(told)]
    assert execution.execute(notebook, tmp_path).cells[0].outputs[0].text == "ipc\n"
