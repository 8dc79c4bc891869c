"""A run grades submissions without a result, records failures apart, and changes nothing when repeated."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ringlab_course.gradebook import pool, versions
from ringlab_course.gradebook.pool import Here, Job, LocalPool, Outcome
from ringlab_course.gradebook.runner import Run, Watch, grade_class
from ringlab_course.gradebook.store import Gradebook
from ringlab_course.gradebook.versions import contract_version
from tests.course.gradebook.stub import judge, submissions, write

WORDS = {"ada": "10", "bob": "5", "cy": "0"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for learner, word in WORDS.items():
        write(tmp_path / "class", learner, word)
    return tmp_path / "class"


def graded(book: Gradebook, folder: Path, **options) -> Run:
    return grade_class(book, submissions(folder), options.pop("pool", Here(judge)), **options)


def scores(book: Gradebook) -> dict[str, float]:
    return {entry.learner: entry.score for entry in book.entries()}


def test_a_second_run_does_nothing_and_a_new_notebook_is_graded(folder: Path) -> None:
    with Gradebook(None) as book:
        first, again = graded(book, folder), graded(book, folder)
        assert (len(first.graded), len(again.graded), len(again.kept)) == (3, 0, 3)
        write(folder, "bob", "10")
        new = graded(book, folder)
        assert [entry.learner for entry in new.graded] == ["bob"] and scores(book)["bob"] == 10
        assert [len(book.history(learner, "05")) for learner in WORDS] == [1, 2, 1]


@pytest.fixture
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that replaces the packages of exercises 05, 06, 07 and the checks that they share."""
    for name in ("05_ring", "06_cost", "07_load"):
        (tmp_path / f"ringlab_course/exercises/e{name}/right").mkdir(parents=True)
        (tmp_path / f"ringlab_course/exercises/e{name}/contract.py").write_text("1")
    (tmp_path / "ringlab_course/checking").mkdir()
    monkeypatch.setattr(versions, "_HOME", tmp_path)
    folders = tmp_path / "ringlab_course/exercises"
    monkeypatch.setattr(versions, "folder_of", lambda exercise: next(folders.glob(f"e{exercise}_*")))
    return tmp_path / "ringlab_course"


@pytest.mark.parametrize("name", ["contract.py", "wrong_answers.md"])
def test_the_version_of_the_checks_is_that_of_their_sources(checks: Path, name: str) -> None:
    first, other = contract_version("05"), contract_version("06")
    assert first != other and contract_version("05") == first and contract_version("") == ""
    assert contract_version("05", unsafe=True) != first, "results without a sandbox have another version"
    (checks / "exercises/e05_ring" / name).write_text("2")
    assert contract_version("05") != first and contract_version("06") == other


@pytest.mark.parametrize(
    "line",
    [
        "from ringlab_course.exercises.e05_ring.ring import Case",
        "from ringlab_course.exercises.e05_ring import (\n    contract,\n    ring,\n)",
    ],
)
def test_checks_that_use_those_of_another_exercise_change_with_them(checks: Path, line: str) -> None:
    (checks / "exercises/e06_cost/contract.py").write_text(line)
    (checks / "exercises/e05_ring/ring.py").write_text("from ringlab_course.checking.common import x")
    (checks / "checking/common.py").write_text("x = 1")
    first, other = contract_version("06"), contract_version("07")
    (checks / "checking/common.py").write_text("x = 2")
    assert contract_version("06") != first and contract_version("07") == other


def test_a_changed_notebook_draws_new_probes_and_the_same_file_the_same(folder: Path) -> None:
    with Gradebook(None) as book:
        graded(book, folder)
        write(folder, "ada", "10 and a comment")
        graded(book, folder)
        write(folder, "ada", "10")
        graded(book, folder, regrade=["05"])
        first, changed, again = book.history("ada", "05")
        assert first.seed != changed.seed and first.seed == again.seed


def test_the_order_makes_no_difference(folder: Path) -> None:
    found = []
    for shuffle in range(3):
        with Gradebook(None) as book:
            book.use_class_seed(3)
            handed_in = submissions(folder)
            random.Random(shuffle).shuffle(handed_in)
            grade_class(book, handed_in, Here(judge))
            found.append([(e.learner, e.report, e.digest, e.submitted_at) for e in book.entries()])
    assert found[0] == found[1] == found[2]


def test_a_file_that_changes_is_not_graded(folder: Path) -> None:
    write(folder, "ada", "changes")
    path = write(folder, "bob", "5")
    handed_in = submissions(folder)
    path.write_text("10 bob")
    with Gradebook(None) as book:
        run = grade_class(book, handed_in, Here(judge))
        assert {u.learner: "changed" in u.reason for u in run.ungraded} == {"ada": True, "bob": True}


def test_regrading_keeps_the_history_and_spares_other_exercises(folder: Path) -> None:
    write(folder, "ada", "10", "06_what_it_costs")
    with Gradebook(None) as book:
        graded(book, folder)
        run = graded(book, folder, regrade=("05",))
        assert {(e.learner, e.exercise) for e in run.graded} == {(learner, "05") for learner in WORDS}
        assert len(book.history("ada", "05")) == 2 and len(book.history("ada", "06")) == 1
        assert book.history("ada", "05")[0].report == book.history("ada", "05")[1].report


def test_a_regrading_that_was_interrupted_goes_on_with_the_rest(folder: Path) -> None:
    def stop(job: Job, result: object) -> None:
        raise KeyboardInterrupt

    with Gradebook(None) as book:
        graded(book, folder)
        with pytest.raises(KeyboardInterrupt):
            graded(book, folder, regrade=("05",), watch=Watch(ended=stop))
        assert len(book.wanted()) == 2
        run = graded(book, folder, regrade=("05",))
        assert len(run.graded) == 2 and "goes on" in run.notes[0] and book.wanted() == set()
        assert [len(book.history(learner, "05")) for learner in WORDS] == [2, 2, 2]


def test_a_copied_file_is_no_later_submission(folder: Path) -> None:

    with Gradebook(None) as book:
        graded(book, folder)
        before = book.entries()
        os.utime(folder / "ada" / "05_emulated_ring.ipynb", (4e9, 4e9))
        assert graded(book, folder).graded == [] and book.entries() == before
        graded(book, folder, regrade=("05",))
        assert [e.submitted_at for e in book.entries()] == [e.submitted_at for e in before]


def test_results_of_other_checks_than_ours_do_not_count(folder: Path) -> None:
    class Elsewhere(Here):
        def run(self, jobs, started):
            for outcome in super().run(jobs, started):
                yield Outcome(outcome.number, outcome.report, outcome.digest, "05-of-another-ringlab")

    with Gradebook(None) as book:
        run = graded(book, folder, pool=Elsewhere(judge))
        assert book.entries() == [] and all("other checks" in each.reason for each in run.ungraded)


def test_the_pool_grades_all_and_loses_only_what_kills_its_process(folder: Path) -> None:
    for number in range(8):
        write(folder, f"more {number}", "dies" if number in (2, 5) else str(number))
    with Gradebook(None) as book, Gradebook(None) as alone:
        run = graded(book, folder, pool=LocalPool(2, judge))
        assert len(run.graded) == 9 and len(scores(book)) == 9
        assert {u.learner: "status 9" in u.reason for u in run.ungraded} == {"more 2": True, "more 5": True}
        alone.use_class_seed(book.class_seed)
        (folder / "more 2" / "05_emulated_ring.ipynb").unlink()
        (folder / "more 5" / "05_emulated_ring.ipynb").unlink()
        graded(alone, folder)
        assert [(e.learner, e.report) for e in alone.entries()] == [
            (e.learner, e.report) for e in book.entries()
        ]


def never_ends(path: Path, exercise: str | None, **options):
    if "ada" in str(path):
        while True:
            pass
    return judge(path, exercise, **options)


def test_a_judge_that_hangs_costs_one_submission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = pool._Worker.begin
    monkeypatch.setattr(
        pool._Worker, "begin", lambda self, job, _: begin(self, job, 0.0 if "ada" in job.name else 1e5)
    )
    with Gradebook(None) as book:
        run = graded(book, folder, pool=LocalPool(1, never_ends))
        assert [u.learner for u in run.ungraded] == ["ada"] and "did not end" in run.ungraded[0].reason
        assert set(scores(book)) == {"bob", "cy"}
