"""A wrong helper costs its own points: later stages are graded again with the reference's functions in its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.checking.wrong_answers import namespace_of, right_answers
from ringlab_course.judge.judge import GradeReport, grade
from ringlab_course.judge.right_helpers import reference_cell
from tests.course.judge.small_contract import notebook

SCALED = """
right_{name} = {name}
def {name}(*inputs, **options):
    return tuple(3 * x for x in right_{name}(*inputs, **options))
"""
"""A cell that makes a function wrong."""
UNWRITTEN = "def {name}(*inputs, **options):\n    raise NotImplementedError\n"


def graded(folder: Path, exercise: str, *cells: str) -> GradeReport:
    right = next(iter(right_answers(exercise).values()))
    return grade(notebook(folder, right, *cells), exercise, seed=1)


def again(report: GradeReport) -> dict[str, tuple[tuple[str, ...], int, int]]:
    """Return the replaced functions, the points and the points with the reference, by stage graded again."""
    stages = [stage for stage in report.stages if stage.replaced]
    return {stage.stage: (stage.replaced, stage.earned, stage.earned_again) for stage in stages}


@pytest.mark.needs_bwrap
def test_a_wrong_helper_costs_its_own_points_alone(tmp_path: Path) -> None:
    report = graded(tmp_path, "01", SCALED.format(name="softmax"))
    assert again(report) == {"01.attention": (("softmax",), 0, 12), "01.grouped": (("softmax",), 0, 8)}
    assert (report.earned, report.earned_with_reference, report.points) == (6, 26, 36)
    assert report.as_dict()["earned_with_reference"] == 26 and not report.ok


@pytest.mark.needs_bwrap
def test_what_is_wrong_by_itself_stays_wrong_and_is_replaced_for_those_that_call_it(tmp_path: Path) -> None:
    report = graded(tmp_path, "01", SCALED.format(name="softmax"), SCALED.format(name="attention"))
    assert again(report) == {
        "01.attention": (("softmax",), 0, 0),
        "01.grouped": (("attention", "softmax"), 0, 8),
    }


@pytest.mark.needs_bwrap
def test_a_wrong_stage_with_right_helpers_is_not_graded_again(tmp_path: Path) -> None:
    report = graded(tmp_path, "01", SCALED.format(name="grouped_attention"))
    assert again(report) == {} and report.earned == report.earned_with_reference == 28


@pytest.mark.needs_bwrap
def test_a_stage_whose_helper_is_unwritten_is_not_called_unwritten(tmp_path: Path) -> None:
    report = graded(tmp_path, "01", UNWRITTEN.format(name="softmax"))
    attention = report.stages[2]
    assert attention.status == "wrong" and attention.earned_again == attention.points
    assert "First mend `softmax` (01.softmax)" in attention.checks[0].message
    empty = graded(tmp_path, "01", *map(UNWRITTEN.format_map, ({"name": s.function} for s in load_exercise("01").stages)))  # fmt: skip
    assert again(empty) == {} and empty.earned_with_reference == 0
    assert {stage.status for stage in empty.stages} == {"not written"}


@pytest.mark.needs_bwrap
def test_nothing_that_has_seen_the_reference_is_told(tmp_path: Path) -> None:
    """The later stage finds the reference's code in its process, and neither its text nor a note gets out."""
    telling = """
import linecache
def attention(*inputs, **options):
    seen = "".join(line for name, entry in linecache.cache.items() if name[:5] == "<cell" for line in entry[2])
    assert "_reference_softmax" not in seen, seen
    raise NotImplementedError
"""
    report = graded(tmp_path, "01", SCALED.format(name="softmax"), telling)
    assert again(report)["01.attention"][2] == 0
    assert "_reference_softmax" not in json.dumps(report.as_dict())


@pytest.mark.needs_bwrap
def test_whoever_breaks_the_protocol_then_gets_nothing(tmp_path: Path) -> None:
    hostile = """
import os, socket
def attention(*inputs, **options):
    if "_reference_softmax" in globals():
        for number in range(3, 64):
            try:
                os.write(number, b"x" * 64)
            except OSError:
                pass
    raise ValueError
"""
    report = graded(tmp_path, "01", SCALED.format(name="softmax"), hostile)
    assert report.reason and report.earned_with_reference == 0


@pytest.mark.thorough
@pytest.mark.needs_bwrap
@pytest.mark.parametrize(
    ("exercise", "style", "helper", "stages"),
    [
        ("05", "shift", "ring_step", ("05.forward", "05.causal")),
        ("08", "by_piece", "tile_counts", ("08.balance",)),
        ("19", "solution", "merge_all", ("19.decode", "19.prefill")),
    ],
)
def test_the_reference_suits_callers_of_other_styles(
    tmp_path: Path, exercise: str, style: str, helper: str, stages: tuple[str, ...]
) -> None:
    right = right_answers(exercise)[style]
    report = grade(notebook(tmp_path, right, SCALED.format(name=helper)), exercise, seed=1)
    points = {stage.id: stage.points for stage in load_exercise(exercise).stages}
    assert again(report) == {stage: ((helper,), 0, points[stage]) for stage in stages}


@pytest.mark.parametrize("exercise_id", exercise_ids())
def test_the_reference_defines_each_helper_and_no_other_name(exercise_id: str) -> None:
    stages = load_exercise(exercise_id).stages
    own = {stage.function for stage in stages}
    helpers = sorted({name for stage in stages if stage.waits for name in stage.helpers} & own)
    space = namespace_of(reference_cell(exercise_id, helpers), "<reference>")
    names = set(space) - {"__name__", "__builtins__"}
    assert names == {*helpers, *(f"_reference_{name}" for name in helpers)}
    assert all(callable(space[name]) for name in helpers)
