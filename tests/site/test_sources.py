"""How texts become pages: docstrings, annotations, links, skeletons; and what the builder refuses."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

from ringlab_course.builder.sources import Target, targets
from ringlab_course.catalogue import LESSONS
from tools.website import __main__ as website
from tools.website import (
    docstrings,
    front,
    kill_matrix,
    markdown,
    members,
    moving_ring,
    names,
    notebooks,
    stage,
)

CHECKOUT = Path(__file__).resolve().parents[2]

DOCSTRING = """Return a * b, at most `limit`.

Of two kinds:
    one   the first
    two   the second

memory: account each rank's tensors
    and what they hold.
faults: what goes wrong. seed, kill: what draws
    it. Nothing else.
Raises: ShapeError if P < 1. Source: arXiv 2310.01889.

>>> f(1)
array([[2],
       [3]])
>>> f(2)
4
"""
MARKDOWN = """Return a \\* b, at most `limit`.

Of two kinds:

```text
one   the first
two   the second
```

- `memory`: account each rank's tensors and what they hold.
- `faults`: what goes wrong.
- `seed`, `kill`: what draws it. Nothing else.

**Raises:** ShapeError if P \\< 1. **Source:** arXiv 2310.01889.

```pycon
>>> f(1)
array([[2],
       [3]])
>>> f(2)
4
```"""
SOURCE = '''
from typing import overload
from ringlab.plan import Plan
from ringlab.types import Query

LIMIT = 3
"""How many."""

class Plan2(Base):
    """A class."""

    @property
    def size(self) -> "Plan":
        """Its size."""

    def _hidden(self): "no"

@overload
def f(a: int) -> Plan: "x"

def f(a: Plan, *, q: Float[Tensor, "B H"] = None) -> Query | None:
    """Return it."""

def bare(a): pass

def _own():
    """Not public."""
'''


def test_a_docstring_becomes_markdown() -> None:
    assert docstrings.to_markdown(DOCSTRING) == MARKDOWN


def test_a_fence_inside_a_docstring_stays_inside() -> None:
    text = docstrings.to_markdown("Write it so:\n\n    ```diff\n    -    a\n    ```\n")
    assert text == "Write it so:\n\n````text\n```diff\n-    a\n```\n````"


def test_public_members_are_found_with_their_annotations_spelled_out() -> None:
    tree = names.spelled_out("m", ast.parse(SOURCE), frozenset({"ringlab.plan.Plan", "x.Plan", "y.Other"}))
    found = {member.name: member for member in members.of(tree)}
    assert [*found] == ["LIMIT", "Plan2", "f"]
    assert found["f"].signature == "f(a: ringlab.plan.Plan, *, q: Float[Tensor, 'B H']=None) -> Query | None"
    assert [inner.name for inner in found["Plan2"].inner] == ["size"]


def test_links_to_files_that_are_no_pages_become_their_names() -> None:
    text = "[a](b.md#c) [d](../tests/x.py) [`docs/e.md`](e.md) [f](https://g.org) [h](#i) ![p](q.png)"
    changed = stage.only_known_links(text, "docs", {"docs/b.md"})
    assert changed == "[a](b.md#c) d (`tests/x.py`) `docs/e.md` [f](https://g.org) [h](#i) ![p](q.png)"


def test_text_is_not_taken_for_markup() -> None:
    assert markdown.escape("a*b `c*d` x<y $1 [z]") == "a\\*b `c*d` x\\<y \\$1 \\[z\\]"


def test_what_a_learner_wrote_is_not_published(tmp_path: Path) -> None:
    """The page comes from the source, whatever lies in `exercises/`; each stage has its place on it."""
    (target,) = (t for t in targets(CHECKOUT, ("exercises/05",)) if t.kind == "exercise")
    page = notebooks.exercise_page(
        Target(target.kind, target.slug, target.source, tmp_path / "edited.ipynb"), CHECKOUT
    )
    text = "\n".join(cell.source for cell in page.cells)
    assert text.count("NotImplementedError") == 3
    assert [text.count(f"(stage-05-{name})=\n## 05.{name}") for name in ("step", "forward", "causal")] == [
        1,
        1,
        1,
    ]


def test_a_picture_without_a_description_is_refused(tmp_path: Path) -> None:
    (target,) = (t for t in targets(CHECKOUT, ("notebooks/05",)) if t.kind == "lesson")
    notebook = nbformat.read(target.path, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    next(o for o in outputs if "image/png" in o.get("data", {})).metadata = {}
    nbformat.write(notebook, tmp_path / "bare.ipynb")
    with pytest.raises(ValueError, match="described picture"):
        notebooks.lesson_page(Target("lesson", target.slug, target.source, tmp_path / "bare.ipynb"), None)


def test_a_lesson_that_the_catalogue_does_not_know_is_refused() -> None:
    lessons = [target for target in targets(CHECKOUT) if target.kind == "lesson"]
    assert front.shown(lessons) == list(LESSONS)
    with pytest.raises(ValueError, match="00_start_here"):
        front.shown(lessons[1:])


def test_the_page_of_checks_says_what_finds_each_wrong_answer_and_what_a_check_is_for() -> None:
    run, not_run = (kill_matrix.section("00", run=ran) for ran in (True, False))
    assert (
        "| dealt_heads | dealt_heads | ● | ○ |" in run and "| dealt_heads | dealt_heads | ● |  |" in not_run
    )
    assert "- `one-sequence`: in the notebook it is the only one to find" in run and "- `" not in not_run
    assert kill_matrix.summary("00") == "| 00 | 3 | 7 | 16 | 5 |"


def test_the_moving_ring_is_a_run() -> None:
    """Every block meets every rank once, and each block has a place at each step."""
    steps = moving_ring.run()
    met = {(rank, frame.held[rank]) for frame in steps for rank in frame.computed}
    assert len(steps) == 4 and len(met) == 16
    assert moving_ring.picture().count('class="met') == 16


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit, match="holds something else"):
        website.build(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
