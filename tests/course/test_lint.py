"""Every rule of style passes a good notebook and finds the bad one made for it.

The catalogue says what is there, and leads nowhere else.

Real text, the same on every run, of the shapes that were asked for.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest

import ringlab_course
from ringlab.errors import CourseError
from ringlab_course import catalogue
from ringlab_course.builder import build as builder
from ringlab_course.builder import lint, sources
from ringlab_course.catalogue import CAPSTONE, LESSONS, PAPERS, PARTS, lesson
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.notebook import corpus

HEADER = "# 91 · A lesson\n**Afterwards you can** see. **You need first** lesson 90. **Minutes** 60. **Not allowed:** torch."
CLOSING = "## Recap\nAll of it.\n## Self-check\nWhat was it?\n[exercise](../exercises/91_small.ipynb)"
PNG = {"image/png": "iVBORw0KGgo="}


def good(kind="lesson"):
    """Return a notebook that keeps every rule."""
    new = nbformat.v4
    picture = new.new_output("display_data", data=dict(PNG), metadata={"image/png": {"alt": "a line"}})
    notebook = new.new_notebook(
        metadata={"ringlab": {"kind": kind, "source": "ringlab_course/lessons/91_small.py"}}
    )
    notebook.cells = [
        new.new_markdown_cell(HEADER),
        new.new_code_cell("import numpy as np\nfrom ringlab_course import check, hint"),
        new.new_markdown_cell("What the figure shows."),
        new.new_code_cell("show(figure)", outputs=[picture]),
        new.new_code_cell("def double(x):\n    return 2 * x", metadata={"grade": "91.double"}),
        new.new_code_cell('check("91.double")'),
        new.new_markdown_cell(CLOSING),
    ]
    return notebook


@pytest.mark.parametrize("kind", ["lesson", "exercise", "solution"])
def test_a_good_notebook_breaks_no_rule(kind):
    assert lint.lint(good(kind)) == []


def append(source, **kwargs):
    return lambda n: n.cells.append(nbformat.v4.new_code_cell(source, **kwargs))


def text(number, source):
    return lambda n: n.cells[number].update(source=source)


MUTANTS = {
    "line_width": append("x = " + "1" * 97),
    "no_path_tricks": append("sys.path.insert(0, '..')"),
    "no_installs": append("%pip install numpy"),
    "no_trailing_semicolon": append("x = 1;\ny = 2"),
    "one_import_cell": append("import math"),
    "header": text(0, "# 91 · A lesson\n**You need first** nothing. **Minutes** 60."),
    "closing": text(6, CLOSING.replace("## Self-check", "")),
    "figures_have_alt_text": lambda n: n.cells[3].outputs[0].update(metadata={}),
    "code_in_summaries_is_html": text(
        6, f"{CLOSING}\n\n<details><summary>1. Why `x`?</summary>\n\nFor y.\n</details>"
    ),
    "graded_cells_are_checked": text(5, 'check("91.other")'),
    "check_and_hint_are_imported": text(1, "import numpy as np\nfrom ringlab_course import check"),
    "running_spends_no_hint": append('hint("91.double")'),
}
KIND = {"check_and_hint_are_imported": "exercise"}
"""The kind of notebook that a rule is for, where it is not a lesson."""


def test_every_rule_has_its_mutant():
    assert set(MUTANTS) == {rule.__name__ for rule in lint.RULES}


@pytest.mark.parametrize("rule", lint.RULES, ids=lambda rule: rule.__name__)
def test_a_rule_finds_its_mutant_and_no_other_rule_does(rule):
    kind = KIND.get(rule.__name__, "lesson")
    notebook = good(kind)
    MUTANTS[rule.__name__](notebook)
    assert rule(notebook, kind) != []
    assert lint.lint(notebook) == rule(notebook, kind)


@pytest.mark.parametrize(
    "change",
    [
        append("!ls"),
        append("! pip install x"),
        append("%conda install x"),
        append("    pip install x"),
        text(0, "A lesson. afterwards you can; you need first; minutes"),
        text(6, CLOSING.replace("../exercises/91_small.ipynb", "../exercises/")),
        text(6, CLOSING.replace("## Recap", "")),
        text(2, "![](picture.png)"),
        append("from ringlab import plan\nx = 1"),
        append('x = 1; print(hint("91.double"))'),
    ],
)
def test_more_that_is_found(change):
    notebook = good()
    change(notebook)
    assert len(lint.lint(notebook)) == 1


@pytest.mark.parametrize(
    "change",
    [
        append("x = " + "1" * 96),
        append("x != 1"),
        append("# a; b;c"),
        append('s = "a;"\ndef f():\n    import math'),
    ],
)
def test_what_only_looks_bad_is_left_alone(change):
    notebook = good()
    change(notebook)
    assert lint.lint(notebook) == []


def test_an_exercise_says_what_its_answers_may_not_use():
    notebook = good("exercise")
    notebook.cells[0].source = HEADER.replace("**Not allowed:** torch.", "")
    assert lint.lint(notebook) == ["the first cell lacks **Not allowed:**"]


@pytest.mark.parametrize(
    "target", sources.targets(builder.find_root()), ids=lambda t: f"{t.path.parent.name}/{t.slug}"
)
def test_the_notebooks_of_the_course_keep_every_rule(target):
    assert target.path.exists(), f"ringlab build {target.slug}"
    assert lint.lint(nbformat.read(target.path, as_version=4)) == []


def test_lessons_are_those_that_have_a_source_an_exercise_and_a_contract():
    course = Path(ringlab_course.__file__).parent
    listed = {item.slug for item in LESSONS}
    assert {path.stem for path in (course / "lessons").glob("*.py")} == listed
    exercises = {path.parent.name[1:] for path in (course / "exercises").glob("*/exercise.py")}
    assert exercises == listed | {CAPSTONE.slug}
    assert {load_exercise(exercise_id).slug for exercise_id in exercise_ids()} == exercises


def test_the_capstone_comes_after_the_lessons_and_needs_those_that_are_there():
    assert CAPSTONE not in LESSONS and CAPSTONE.part == LESSONS[-1].part
    assert all(lesson(needed).id == needed for needed in CAPSTONE.needs)


def test_lessons_are_numbered_up_to_the_capstone_and_need_only_what_comes_before():
    assert [item.id for item in LESSONS] == [f"{number:02d}" for number in range(len(LESSONS))]
    assert LESSONS[-1].id < CAPSTONE.id
    for item in LESSONS:
        assert all(lesson(needed).id < item.id for needed in item.needs)
        assert item.part in PARTS and 30 <= item.minutes <= 90
        first = (
            nbformat.read(builder.find_root() / f"notebooks/{item.slug}.ipynb", as_version=4).cells[0].source
        )
        assert f"**Minutes** {item.minutes}" in first


def test_papers_build_on_older_ones_and_each_is_explained_somewhere():
    years = {paper.key: paper.year for paper in PAPERS}
    assert all(years[source] <= paper.year for paper in PAPERS for source in paper.after)
    assert {key for item in LESSONS for key in item.papers} == set(years)


def test_an_unknown_lesson_is_an_error():
    with pytest.raises(CourseError, match=f"from 00 to {LESSONS[-1].id}"):
        catalogue.lesson("99")


def test_importing_the_course_is_light():
    program = (
        "import sys, ringlab_course, ringlab_course.catalogue, ringlab_course.checking.contract\n"
        "heavy = {'torch', 'IPython', 'ipywidgets', 'matplotlib', 'nbformat', 'jupytext', 'triton'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "[]"


def test_tokens_are_the_bytes_of_the_library():
    import heapq

    source = Path(heapq.__file__).read_bytes()
    np.testing.assert_array_equal(corpus.tokens(8192), np.frombuffer(source[:8192], dtype=np.uint8))
    assert corpus.tokens(8192).dtype == np.int64
    assert corpus.text(47) == '"""Heap queue algorithm (a.k.a. priority queue)'  # lesson 00 shows it


def test_a_longer_text_begins_with_the_shorter_one():
    long = corpus.tokens(300_000)
    assert len(long) == 300_000 and np.array_equal(long[:8192], corpus.tokens(8192))


def test_more_than_there_is_is_an_error():
    with pytest.raises(CourseError, match="bytes of Python source"):
        corpus.tokens(10**9)


def test_shapes_and_scale_of_queries_keys_and_values():
    q, k, v = corpus.qkv(256, heads=6, kv_heads=2, head_dim=16)
    assert q.shape == (1, 6, 256, 16) and k.shape == v.shape == (1, 2, 256, 16)
    assert corpus.qkv(8, heads=3)[1].shape == (1, 3, 8, 64)
    for tensor in (q, k, v):
        assert str(tensor.dtype) == "torch.float32" and tensor.is_contiguous()
        assert 0.7 < float(tensor.std()) < 1.3
    assert not np.allclose(k, v)


def test_equal_bytes_at_different_places_differ():
    x = corpus.embedded(64)
    quotes = np.flatnonzero(corpus.tokens(64) == ord('"'))[:2]
    assert not np.allclose(x[quotes[0]], x[quotes[1]])
    np.testing.assert_allclose(np.sqrt((x**2).mean(axis=1)), 1.0)


def test_seeds_decide_and_another_process_gets_the_same():
    first, second, other = corpus.qkv(32), corpus.qkv(32), corpus.qkv(32, seed=1)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
    assert not first[0].equal(other[0])
    program = "from ringlab_course import corpus; print(corpus.qkv(32)[0].double().sum().item().hex())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.strip() == first[0].double().sum().item().hex()
