"""Each entry of a wrong_answers.md makes its wrong answer from the right one, and its text is what learners read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringlab.errors import CourseError
from ringlab_course.checking import wrong_answers as module
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.checking.wrong_answers import (
    entries,
    misconceptions_of,
    mistakes_of,
    right_answers,
    used_by,
    wrong_answers,
)

EXERCISE = '''# %% [markdown]
# # Exercise 01

# %%
import math

from ringlab_course import check

# %% grade="01.causal"
LAST = 0


def causal_mask(q, k):
    """Return a mask."""
    # BEGIN SOLUTION who sees whom
    return k - q[:, None] <= LAST  # a query sees itself
    # END SOLUTION


# %%
def softmax(x):
    return math.exp(x)


def attention(q):
    return softmax(q)


grouped_attention = attention
check("01.causal")
q = attention(1)
'''
SOLUTION_CODE = """\
import math
LAST = 0
def causal_mask(q, k):
    return k - q[:, None] <= LAST
def softmax(x):
    return math.exp(x)
def attention(q):
    return softmax(q)
grouped_attention = attention
"""
ANOTHER = '"""Right."""\n\n\ndef causal_mask(q, k):\n    return k <= q[:, None]\n'
STRICT = """\
# Wrong answers

## strict
stage 01.causal · check origin · of another · misconception strict

A query sees
itself too.

```diff
-    return k <= q[:, None]
+    return k < q[:, None]
```

## strict_again
stage 01.causal · check any · of another · misconception strict

Another text.

```diff
-    return k <= q[:, None]
+    return q[:, None] > k
```

## seen_only
stage 01.softmax · misconception seen_only

Nobody wrote this one down.
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Yield a function that replaces exercise 01's answers by a solution, another right one and wrong ones."""
    caches = (module.right_answers, module.wrong_answers, module.entries, module.misconceptions_of)

    def write(text: str) -> None:
        (tmp_path / "right").mkdir(exist_ok=True)
        (tmp_path / "right" / "another.py").write_text(ANOTHER, encoding="utf-8")
        (tmp_path / "exercise.py").write_text(EXERCISE, encoding="utf-8")
        (tmp_path / module.FILE).write_text(text, encoding="utf-8")
        for cached in caches:
            cached.cache_clear()

    load_exercise("01")
    monkeypatch.setattr(module, "folder_of", lambda exercise_id: tmp_path)
    yield write
    for cached in caches:
        cached.cache_clear()


def test_a_wrong_answer_is_the_edited_right_one_without_what_its_stage_does_not_use(written) -> None:
    written(STRICT)
    strict, again = wrong_answers("01")
    assert strict.source == "def causal_mask(q, k):\n    return k < q[:, None]\n"
    assert (strict.finder, strict.misconception, again.finder) == (
        "01.causal:origin",
        "strict",
        "01.causal:any",
    )


def test_a_right_answer_is_the_solution_but_for_what_its_file_defines(written) -> None:
    written(STRICT)
    another = SOLUTION_CODE.partition("def causal_mask")[0].replace("LAST = 0\n", "")
    another += (
        SOLUTION_CODE[SOLUTION_CODE.index("def softmax") :]
        + ANOTHER.partition('"""\n')[2].rstrip("\n")
        + "\n"
    )
    assert right_answers("01") == {"another": another, "solution": SOLUTION_CODE}


def test_what_learners_read_is_the_text_of_the_first_entry(written) -> None:
    written(STRICT)
    for where in ("01", "01.causal"):
        mistake = mistakes_of(where)("strict", len)
        assert (mistake.message, mistake.imitate) == ("A query sees itself too.", len)
    assert mistakes_of("01")("seen_only").message == "Nobody wrote this one down."
    assert mistakes_of("01.causal")("seen_only").message == "Nobody wrote this one down."
    with pytest.raises(CourseError, match="text for misconception 'unheard_of'"):
        mistakes_of("01")("unheard_of")


def test_the_mistakes_of_a_stage_are_those_that_its_entries_name(written) -> None:
    written(STRICT + "\n## again_seen_only\nstage 01.causal · misconception seen_only\n")
    assert [(m.name, m.message) for m in misconceptions_of("01.causal")] == [
        ("strict", "A query sees itself too."),
        ("seen_only", "Nobody wrote this one down."),
    ]


def test_an_answer_has_variants(written) -> None:
    written(STRICT.replace("strict\n\nA query", "strict · variants <, <<\n\nA query"))
    strict, again = wrong_answers("01")
    assert strict.sources == (strict.source, strict.source.replace("<", "<<"))
    assert again.sources == (again.source,)


def test_a_right_answer_is_printed_and_an_unknown_one_refused(written, capsys) -> None:
    written(STRICT)
    assert module.main(["01", "solution"]) == 0 and capsys.readouterr().out == SOLUTION_CODE
    with pytest.raises(SystemExit):
        module.main(["01", "plain"])
    assert "one of another, solution; got plain" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["check origin · ", "of another · "])
def test_an_edit_without_a_check_or_a_right_answer_is_refused(written, field) -> None:
    written(STRICT.replace(field, ""))
    with pytest.raises(CourseError, match="entry 'strict' of 01.causal"):
        wrong_answers("01")


def test_of_a_module_what_a_function_uses_is_kept_in_its_order() -> None:
    source = (
        '"""About the whole."""\n\nimport math\nimport numpy as np\n\nBASE = 2.0\nUNUSED = 3\n\n\n'
        "# Two of them.\ndef log(x):\n    return math.log(x) / math.log(BASE)\n\n\n"
        "@staticmethod\ndef other(x):\n    return np.log(x)\n\n\ndef lse(x):\n    return log(x)\n\n\nlog.base = BASE\nprint()\n"
    )
    kept = used_by(("lse",), source)
    assert kept.startswith("import math\n\nBASE = 2.0\n\n\n# Two of them.\ndef log(x):") and kept.endswith(
        "print()\n"
    )
    for dropped in ("About", "numpy", "UNUSED", "other", "staticmethod"):
        assert dropped not in kept
    assert "log.base = BASE" in kept and used_by(("other",), source).count("def ") == 2


@pytest.mark.parametrize("exercise_id", exercise_ids())
def test_entries_name_what_their_stage_has(exercise_id) -> None:
    for entry in entries(exercise_id):
        stage = load_exercise(exercise_id).stage(entry.fields["stage"])
        if "check" in entry.fields:
            stage.check(entry.fields["check"])
        if "misconception" in entry.fields:
            stage.misconception(entry.fields["misconception"])
        if not entry.hunks:
            assert entry.fields.get("misconception"), f"{entry.name} has neither an edit nor a misconception"
    assert {answer.right for answer in wrong_answers(exercise_id)} <= set(right_answers(exercise_id))
