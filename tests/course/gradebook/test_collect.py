"""Each notebook in a learner's folder becomes a submission or a note, whatever else the folder contains."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.errors import CourseError
from ringlab_course.gradebook import collect as collect_module
from ringlab_course.gradebook.collect import collect, exercise_of, learner_of
from ringlab_course.gradebook.pool import Here
from ringlab_course.gradebook.readable import shown_name
from ringlab_course.gradebook.runner import grade_class
from ringlab_course.gradebook.store import Gradebook
from ringlab_course.gradebook.versions import digest_of


def notebook(
    path: Path | bytes, exercise: str | None = "05", text: str = "", at: float | None = None
) -> None:
    """Write a notebook with `exercise` in its metadata, and set the time of its last change to `at`."""
    metadata = {"grade": f"{exercise}.step"} if exercise else {}
    cell = {"cell_type": "code", "source": text, "metadata": metadata, "outputs": [], "execution_count": None}
    path = Path(os.fsdecode(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]}))
    if at is not None:
        os.utime(path, (at, at))


def keys(*paths: Path, **options) -> list[tuple[str, str]]:
    return [each.key for each in collect(paths, **options).submissions]


@pytest.mark.parametrize(
    ("path", "root", "key"),
    [
        ("class/ada/05_emulated_ring.ipynb", "class", ("ada", "05")),
        ("class/ada/05_emulated_ring/bob/x.ipynb", "class", ("ada", "05")),
        ("class/05_emulated_ring/ada.ipynb", "class", ("ada", "05")),
        ("class/ada.ipynb", "class", ("ada", "05")),
        ("class/ada_05.ipynb", "class", ("ada", "05")),
        ("class/05_emulated_ring_ada.ipynb", "class", ("ada", "05")),
        ("class/ada/05_emulated_ring.ipynb", "class/ada", ("ada", "05")),
        ("class/ada/05_emulated_ring.ipynb", "class/ada/05_emulated_ring.ipynb", ("ada", "05")),
        ("c/submitted/ada/05_emulated_ring/05_emulated_ring.ipynb", "c/submitted", ("ada", "05")),
        ("class/DAVE_05.IPYNB", "class", ("DAVE", "05")),
        ("class/rene\u0301_05.ipynb", "class", ("ren\u00e9", "05")),
    ],
)
def test_whose_a_notebook_is(tmp_path: Path, path: str, root: str, key: tuple[str, str]) -> None:
    notebook(tmp_path / path)
    assert keys(tmp_path / root) == [key]


@pytest.mark.parametrize(
    ("name", "exercise"),
    [
        ("05_emulated_ring.ipynb", "05"),("ada_05.ipynb", "05"),
("ada_77.ipynb", ""),("ada.ipynb", ""),
    ],
)  # fmt: skip
def test_an_unreadable_notebook_is_of_the_exercise_that_its_path_names(
    tmp_path: Path, name: str, exercise: str
) -> None:
    path = tmp_path / "ada" / name
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert exercise_of(path) == exercise and keys(tmp_path) == [("ada", exercise)]


def test_taken_for_one_exercise_the_notebooks_of_others_are_left_alone(tmp_path: Path) -> None:
    for exercise in ("01", "05", None):
        notebook(tmp_path / "ada" / f"{exercise}.ipynb", exercise)
    found = collect([tmp_path], exercise="05")
    assert [each.path.name for each in found.submissions] == ["05.ipynb"]
    assert any("name an exercise other than 05" in note for note in found.notes)
    with pytest.raises(CourseError, match="one of the exercises"):
        collect([tmp_path], exercise="77")


def test_of_several_notebooks_the_last_counts_and_the_notes_say_so(tmp_path: Path) -> None:
    for name, at in (("a", 100), ("new/c", 300), ("b", 200)):
        notebook(tmp_path / "ada" / f"{name}.ipynb", at=at)
    notebook(
        tmp_path / "ada" / "05_emulated_ring.ipynb", None, at=400
    )  # no cell's metadata names an exercise, as in a lesson
    found = collect([tmp_path])
    assert [each.path.name for each in found.submissions] == ["c.ipynb"]
    assert len(found.notes) == 1 and "4 notebooks" in found.notes[0] and "c.ipynb counts" in found.notes[0]


def test_one_learner_under_two_folders_may_be_two_people(tmp_path: Path) -> None:
    for learner in ("ada", "bob"):
        notebook(tmp_path / learner / "work" / "x.ipynb")
    with pytest.raises(CourseError, match="work under .*ada and under .*bob"):
        collect([tmp_path / "ada", tmp_path / "bob"])
    assert keys(tmp_path) == [("ada", "05"), ("bob", "05")]
    assert keys(tmp_path / "ada", tmp_path / "bob", learner="cy") == [("cy", "05")]


def test_no_learner_can_hand_in_for_another(tmp_path: Path) -> None:
    notebook(tmp_path / "bob" / "05_emulated_ring.ipynb", at=100)
    for path in ("bob/x", "submitted/bob/x", "submitted/bob/05_emulated_ring/x", "05_emulated_ring/bob"):
        notebook(tmp_path / "mallory" / f"{path}.ipynb", at=4e9)
    (tmp_path / "mallory" / "submitted" / "bob" / "05_emulated_ring" / "timestamp.txt").write_text(
        "2099-01-01 00:00:00 UTC"
    )
    found = {each.learner: each.path for each in collect([tmp_path]).submissions}
    assert found["bob"] == tmp_path / "bob" / "05_emulated_ring.ipynb" and set(found) == {"bob", "mallory"}


def test_nbgraders_time_of_submission(tmp_path: Path) -> None:
    stamps = {
        "ada": "2026-11-30 22:10:01.123456 UTC",
        "bob": "2026-11-30 22:10:01.123456 Europe/Berlin",
        "cy": "2026-11-30 22:10:01",
        "dee": "soon",
        "eve": "2026-11-30 22:10:01 UTC" + " " * 5000 + "x",
    }
    for learner, stamp in stamps.items():
        path = tmp_path / "submitted" / learner / "ring" / "x.ipynb"
        notebook(path, at=1e9)
        path.with_name("timestamp.txt").write_text(stamp)
    os.symlink("/etc/hostname", tmp_path / "submitted" / "eve" / "ring" / "link")
    (tmp_path / "nbgrader_config.py").touch()
    found = {each.learner: (each.submitted_at, each.stamped) for each in collect([tmp_path]).submissions}
    assert found["ada"] == ("2026-11-30T22:10:01.123456+00:00", True)
    assert found["bob"] == ("2026-11-30T21:10:01.123456+00:00", True)
    assert found["cy"] == ("2026-11-30T22:10:01.000000+00:00", True)
    assert found["dee"] == ("2001-09-09T01:46:40.000000+00:00", False)
    assert found["eve"][1], "the first 200 characters are enough"


def test_a_learners_own_time_stamp_makes_nothing_earlier(tmp_path: Path) -> None:
    """A time stamp counts only in an nbgrader course, and a note there names each notebook newer than its stamp."""
    path = tmp_path / "submitted" / "mallory" / "05_emulated_ring" / "x.ipynb"
    notebook(path, at=1e9)
    path.with_name("timestamp.txt").write_text("2000-01-01 00:00:00 UTC")
    assert collect([tmp_path]).submissions[0].submitted_at == "2001-09-09T01:46:40.000000+00:00"
    assert not collect([tmp_path]).notes
    (tmp_path / "nbgrader_config.py").touch()
    found = collect([tmp_path])
    assert found.submissions[0].stamped and found.notes == [
        "changed after the time in their timestamp.txt, a file that a learner can write: mallory 05"
    ]


HOSTILE = [
    b"new\nline", b"quote'\"`", b"semi;colon && rm", b"=1+1", b"\x1b[2Jclear", b"not utf-8 \xff\xfe", b"x" * 249,
    "right\u202eto left".encode(), b"back\\nslash", b" ", b"-rf", b"[red]markup[bold]", b"%s%n", b"..hidden",
    "\U0001f600 é".encode(),
]  # fmt: skip


def test_hostile_names_are_learners_like_any_other(tmp_path: Path) -> None:
    for name in HOSTILE:
        os.mkdir(os.path.join(os.fsencode(tmp_path), name))
        notebook(os.path.join(os.fsencode(tmp_path), name, b"05_emulated_ring.ipynb"))
        notebook(os.path.join(os.fsencode(tmp_path), b"flat", name[:240] + b".ipynb"))
    found = collect([tmp_path / "flat"]).submissions + [
        e for e in collect([tmp_path]).submissions if e.learner != "flat"
    ]
    assert len({each.learner for each in found}) == len(HOSTILE) + 1, (
        "one long name occurs whole and cut, so it counts twice"
    )
    assert all(each.learner.isprintable() and each.digest for each in found)

    def judge(path: Path, exercise: str | None, **options):
        from tests.course.gradebook.stub import report

        assert path.is_file()
        return report(str(path), exercise or "", 10, options["seed"])

    with Gradebook(tmp_path / "book") as book:
        handed_in = collect([tmp_path]).submissions
        run = grade_class(book, handed_in, Here(judge))
        assert run.ungraded == [] and len(book.entries()) == len(handed_in)
        assert {entry.path for entry in book.entries()} == {shown_name(each.path) for each in handed_in}


segment = st.sampled_from(["ada", "bob", "05_emulated_ring", "submitted", "05", "x", "..x"])


@given(st.lists(segment, min_size=1, max_size=5), segment)
@settings(max_examples=200)
def test_the_learner_is_the_first_folder_whatever_lies_below(folders: list[str], stem: str) -> None:
    root = Path("/no such folder/class")
    whose = learner_of(root.joinpath("mallory", *folders, f"{stem}.ipynb"), root, "05")
    assert whose == "mallory"


def test_links_and_odd_files_are_zeros_and_no_doors(tmp_path: Path) -> None:
    for learner in ("link", "dangling", "folder", "pipe", "loop", "linked folder", "good"):
        (tmp_path / learner).mkdir()
    notebook(tmp_path / "good" / "x.ipynb")
    (tmp_path / "link" / "x.ipynb").symlink_to(tmp_path / "good" / "x.ipynb")
    (tmp_path / "dangling" / "x.ipynb").symlink_to(tmp_path / "none")
    (tmp_path / "folder" / "x.ipynb").mkdir()
    os.mkfifo(tmp_path / "pipe" / "x.ipynb")
    (tmp_path / "loop" / "again").symlink_to(tmp_path)
    (tmp_path / "linked folder" / "stolen").symlink_to(tmp_path / "good")
    found = collect([tmp_path])
    assert [each.learner for each in found.submissions] == ["dangling", "folder", "good", "link", "pipe"]
    assert len({each.digest for each in found.submissions}) == 4, (
        "a folder and a pipe are no files, and have the same digest"
    )
    assert sum("a link to a folder" in note for note in found.notes) == 2


def test_enormous_and_unreadable_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ada" / "05_emulated_ring.ipynb"
    path.parent.mkdir()
    with open(path, "wb") as file:
        file.truncate(10 << 30)
    before = digest_of(path)
    assert keys(tmp_path) == [("ada", "05")]
    with open(path, "wb") as file:
        file.truncate(11 << 30)
    assert digest_of(path) != before

    def full(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.open", full)
    assert collect_module.handed_in(path, tmp_path).digest == "", (
        "the failure is our own, so grading reads the file again"
    )


def test_checkpoints_and_litter_are_no_submissions(tmp_path: Path) -> None:
    for name in (".ipynb_checkpoints/x-checkpoint", "__MACOSX/x", "._x", ".git/x"):
        notebook(tmp_path / "ada" / f"{name}.ipynb")
    notebook(tmp_path / "__MACOSX" / "ada" / "x.ipynb")
    (tmp_path / "ada" / "notes.txt").write_text("05")
    assert collect([tmp_path]).submissions == [] and collect([]).submissions == []


def test_the_walk_is_bounded_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_module, "ENTRIES", 50)
    notebook(tmp_path / "deep" / Path(*"d" * 30) / "x.ipynb")
    for number in range(100):
        (tmp_path / "full" / f"{number:03}").mkdir(parents=True)
        notebook(tmp_path / "wide" / f"{number:03}" / "x.ipynb")
    notebook(tmp_path / "good" / "x.ipynb")
    notes: list[str] = []
    found = list(collect_module.notebooks_below(tmp_path, notes))
    assert tmp_path / "good" / "x.ipynb" in found, "files of one learner hide no other learner's notebook"
    assert len(found) <= 52 and not any("deep" in path.parts for path in found)
    assert any("12 folders deep" in note for note in notes)
    for crowded in ("full", "wide"):
        assert any(crowded in note and "more than 50 files" in note for note in notes)


def test_of_thousands_of_notebooks_of_one_learner_only_the_newest_are_opened(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(collect_module, "MOST_OF_ONE", 5)
    for number in range(20):
        notebook(tmp_path / "ada" / f"{number}.ipynb", at=1000 + number)
        notebook(tmp_path / f"flat {number}.ipynb")
    found = collect([tmp_path])
    assert len(found.submissions) == 21, "each notebook outside of the folder counts as one learner"
    assert found.submissions[0].path.name == "19.ipynb" and any(
        "only the newest 5" in note for note in found.notes
    )
