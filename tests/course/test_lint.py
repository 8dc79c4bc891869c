"""Every rule of style accepts a good notebook, and finds the fault in the bad notebook made for that rule."""

from __future__ import annotations

import nbformat
import pytest

from ringlab_course.builder import build as builder
from ringlab_course.builder import lint, sources

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
"""For each rule that is not for lessons: the kind of notebook that it is for."""


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
        append("%conda install x"),
        text(0, "A lesson. afterwards you can; you need first; minutes"),
        text(6, CLOSING.replace("../exercises/91_small.ipynb", "../exercises/")),
        append("from ringlab import plan\nx = 1"),
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
