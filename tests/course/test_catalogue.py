"""The catalogue lists the lessons and exercises that exist, and its links lead only to them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat

import ringlab_course
from ringlab_course.builder import build as builder
from ringlab_course.catalogue import CAPSTONE, COURSE, LESSONS, PARTS, SHORTEST_WAY, lesson
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.figures.course_ring import all_needs


def test_lessons_are_those_that_have_a_source_an_exercise_and_a_contract():
    course = Path(ringlab_course.__file__).parent
    listed = {item.slug for item in LESSONS}
    assert {path.stem for path in (course / "lessons").glob("*.py")} == listed
    exercises = {path.parent.name[1:] for path in (course / "exercises").glob("*/exercise.py")}
    assert exercises == listed | {CAPSTONE.slug}
    assert {load_exercise(exercise_id).slug for exercise_id in exercise_ids()} == exercises


def test_a_lesson_needs_only_lessons_that_are_read_before_it():
    assert {each.part for each in COURSE[: COURSE.index(CAPSTONE)]} == {*PARTS[:-1]}
    for number, item in enumerate(COURSE):
        assert {*item.needs} <= {each.id for each in COURSE[:number]}
    for item in LESSONS:
        assert 30 <= item.minutes <= 90
        cells = nbformat.read(builder.find_root() / f"notebooks/{item.slug}.ipynb", as_version=4).cells
        assert f"**Minutes** {item.minutes}" in cells[0].source


def test_every_lesson_leads_to_the_next_one_and_the_last_to_the_end():
    for item, following in zip(COURSE, (*COURSE[1:], None), strict=True):
        if item is not CAPSTONE:
            cells = nbformat.read(builder.find_root() / f"notebooks/{item.slug}.ipynb", as_version=4).cells
            last = cells[-1].source.splitlines()[-1]
            assert (f"{following.slug}.ipynb" if following else "after-the-course.md") in last


def test_the_shortest_way_leaves_nothing_out_and_takes_at_most_eight_hours():
    assert SHORTEST_WAY == (*all_needs("09"), "09")
    way = [lesson(each) for each in SHORTEST_WAY]
    assert sum(each.minutes for each in way) + 60 <= 8 * 60
    exercise = builder.find_root() / f"exercises/{lesson('05').slug}.ipynb"
    assert "**Minutes** 60" in nbformat.read(exercise, as_version=4).cells[0].source


def test_importing_the_course_is_light():
    program = (
        "import sys, ringlab_course, ringlab_course.catalogue, ringlab_course.checking.contract\n"
        "heavy = {'torch', 'IPython', 'ipywidgets', 'matplotlib', 'nbformat', 'jupytext', 'triton'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "[]"
