"""The catalogue lists the lessons and exercises that exist, and its links lead only to them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat

import ringlab_course
from ringlab_course.builder import build as builder
from ringlab_course.catalogue import CAPSTONE, LESSONS, PARTS, lesson
from ringlab_course.checking.loading import exercise_ids, load_exercise


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


def test_importing_the_course_is_light():
    program = (
        "import sys, ringlab_course, ringlab_course.catalogue, ringlab_course.checking.contract\n"
        "heavy = {'torch', 'IPython', 'ipywidgets', 'matplotlib', 'nbformat', 'jupytext', 'triton'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "[]"
