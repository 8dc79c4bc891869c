"""`apply` turns a text into the other text of their `diff`, and files of entries are read as written."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab import edits
from ringlab.edits import Entry, apply, diff, read
from ringlab.errors import EditError

LINES = st.sampled_from(["", " ", "a", "b", " a", "-a", "+b", "@@", "```", "```diff", "## a", "\r"])
TEXTS = st.one_of(st.text(), st.lists(LINES, max_size=12).map("\n".join))


@given(TEXTS, TEXTS)
def test_apply_restores_what_diff_saw(base: str, wrong: str) -> None:
    assert apply(diff(base, wrong), base) == wrong


@given(TEXTS, TEXTS)
def test_hunks_come_back_from_markdown_as_they_were(base: str, wrong: str) -> None:
    hunks = diff(base, wrong)
    [entry] = read(f"## wrong\n\n```diff\n{hunks}\n```\n")
    assert apply(entry.hunks, base) == wrong


def test_equal_texts_have_no_hunks() -> None:
    assert diff("a\n", "a\n") == "" and apply("", "a\n") == "a\n"


def test_diff_adds_the_least_context_that_makes_a_hunk_occur_once() -> None:
    base = "def f():\n    return 1\n\ndef g():\n    return 1\n"
    assert diff(base, base.replace("def g", "def h")) == "-def g():\n+def h():"
    changed = "def f():\n    return 1\n\ndef g():\n    return 2\n"
    assert diff(base, changed) == " def g():\n-    return 1\n+    return 2"
    assert diff(base, "import m\n" + base) == "+import m\n def f():"


def test_changes_far_apart_are_hunks_of_their_own() -> None:
    base = "a\nb\nc\nd\ne\n"
    assert diff(base, "A\nb\nc\nd\nE\n") == "-a\n+A\n@@\n-e\n+E"
    assert diff(base, "A\nb\nC\nd\ne\n") == "-a\n+A\n b\n-c\n+C"


def test_hunks_apply_to_what_those_before_them_left() -> None:
    assert apply("-a\n+b\n@@\n-b\n+c", "a\n") == "c\n"


PAGE = """# Wrong programs
Free text.

## first
stage 05.forward · of loops
The first line,
and the second.

Another paragraph.

```diff
 a

-b
+c
```

## second_one
stage 06
"""


def test_a_file_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    assert read(path, required=["stage"], optional=["of"]) == (
        Entry(
            "first",
            {"stage": "05.forward", "of": "loops"},
            "The first line, and the second.\n\nAnother paragraph.",
            " a\n\n-b\n+c",
        ),
        Entry("second_one", {"stage": "06"}, "", ""),
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("stage 06", "age 06"), "keys among stage, of"),
        (("stage 06", "stage"), "one value of key 'stage'"),
        (("stage 06", "stage 06 · stage 07"), "two values"),
        (("stage 06", "of loops"), "key 'stage'"),
        (("stage 06", ""), "key 'stage'"),
        (("## second_one", "## first"), "'first': a name that no other entry has"),
        (("-b", "b"), "got: 'b'"),
        (("-b\n+c", " b"), "something to change"),
        ((" a\n\n-b\n", ""), "an insertion needs a line of context"),
        (("+c\n", "+c\n@@\n"), "hunk 2: something to change"),
        (("```\n", ""), "at most one fence"),
        (("```\n", "```\n\n```diff\n-x\n```\n"), "at most one fence"),
        (("```\n", "```\nMore.\n"), "text after it"),
        (("```diff", "```python"), "at most one fence"),
    ],
)
def test_a_file_that_is_invalid_says_where_and_why(
    change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "page.md"
    assert PAGE.count(change[0]) == 1
    path.write_text(PAGE.replace(*change))
    with pytest.raises(EditError) as caught:
        read(path, required=["stage"], optional=["of"])
    assert "page.md, entry 'first'" in str(caught.value) or "page.md, entry 'second_one'" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("base", "times"), [("b\n", 0), ("xa\n", 0), ("a\na\n", 2), ("a\nb\na\n", 2)], ids=repr
)
def test_a_hunk_must_occur_once_as_whole_lines(base: str, times: int) -> None:
    with pytest.raises(EditError, match=f"needed: page.md, entry x, hunk 2: (.|\n)*got: {times} times:\na\n"):
        apply("-first\n+second\n@@\n-a\n+c", "first\n" + base, "page.md, entry x")


def test_overlapping_occurrences_count() -> None:
    with pytest.raises(EditError, match="2 times"):
        apply(" a\n-a\n+b", "a\na\na\n")


def test_the_command_prints_a_fence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text("a = 1\nb = 2\n")
    wrong.write_text("a = 1\nb = 3\n")
    assert edits.main([str(right), str(wrong)]) == 0
    assert capsys.readouterr().out == "```diff\n-b = 2\n+b = 3\n```\n"
