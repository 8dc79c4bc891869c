"""A learner can do the course's main task end to end: lesson 05, its exercise, its grade and real processes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch

from ringlab import VirtualCluster, contiguous, launch
from ringlab_course.checking.loading import load_exercise, load_stage
from ringlab_course.notebook import corpus
from tests.browser.lab import CHECKOUT, Lab, serve
from tests.browser.notebook_page import NotebookPage, arrow, enter, open_notebook
from tests.course.submissions_of import submission
from tools.browser import Window, window

pytestmark = [pytest.mark.thorough, pytest.mark.needs_chromium, pytest.mark.needs_bwrap, pytest.mark.slow]

EXERCISE = "exercises/05_emulated_ring.ipynb"
STAGES = ("05.step", "05.forward", "05.causal")
MISTAKE = "averages_partials"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with serve(tmp_path) as running:
        yield running


@pytest.fixture
def browser(lab: Lab) -> Iterator[Window]:
    with window() as opened:
        enter(opened.page, lab)
        yield opened


def test_a_learner_goes_from_the_lesson_to_full_points_and_to_real_processes(lab, browser):
    study(open_notebook(browser.page, "notebooks/05_emulated_ring.ipynb"))

    exercise = open_notebook(browser.page, EXERCISE)
    sees_what_is_not_written(exercise)
    is_told_of_a_mistake(exercise)
    poor = graded(lab.folder / EXERCISE)
    gets_it_right(exercise)
    full = graded(lab.folder / EXERCISE)

    assert not poor["ok"]
    assert full["ok"], full
    assert 0 <= poor["earned"] < full["earned"] == full["points"]
    assert full["points"] == sum(stage.points for stage in load_exercise("05").stages)
    assert browser.strangers() == []
    runs_on_real_processes(lab.folder / EXERCISE)


def study(lesson: NotebookPage) -> None:
    """Run the lesson on its 8,192 tokens and 8 ranks, and step through its ring."""
    lesson.run_all()
    assert [error for cell in lesson.cells for error in cell.errors] == []
    assert "S, P, H, K, D = 8192, 8, 8, 2, 64" in lesson.find("corpus.qkv(S,").source
    sent = 7 * 2 * (8192 // 8) * 2 * 64 * 4
    assert f"ring       {sent:>9,} bytes sent by a rank" in lesson.find("ringed = run_package(").text
    player = lesson.select(lesson.find("ring_view.play(").index)
    for step in (1, 2, 3):
        arrow(player, "ArrowRight")
        player.locator(f"img[alt^='Step {step}.']").wait_for()


def sees_what_is_not_written(exercise: NotebookPage) -> None:
    """Run the unchanged skeleton: every check reports that the code is missing, and no cell raises."""
    exercise.run_all()
    assert [error for cell in exercise.cells for error in cell.errors] == []
    for stage in STAGES:
        assert "not written yet" in exercise.find(f'check("{stage}")').text


def is_told_of_a_mistake(exercise: NotebookPage) -> None:
    """Average the partial outputs, get the message about that mistake, and save the notebook."""
    text = submission(f"05/wrong_step_{MISTAKE}").source
    function = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    told = answer(exercise, "05.step", ast.get_source_segment(text, function) or "")
    message = next(m.message for m in load_stage("05.step").misconceptions if m.name == MISTAKE)
    assert flat(message) in flat(told)
    assert "visible checks passed" not in told
    exercise.save()


def gets_it_right(exercise: NotebookPage) -> None:
    """Write the worked solution into the graded cells, stage by stage, and save."""
    solution = nbformat.read(CHECKOUT / "solutions" / Path(EXERCISE).name, as_version=4)
    right = {cell.metadata.get("grade"): cell.source for cell in solution.cells}
    for stage in STAGES:
        assert "visible checks passed" in answer(exercise, stage, right[stage])
    exercise.save()


def answer(exercise: NotebookPage, stage: str, source: str) -> str:
    """Write `source` into the stage's cell, run it and its check, and return the check's output."""
    place = exercise.graded(stage).index
    exercise.write(place, source)
    assert exercise.run(place).errors == []
    return exercise.run(exercise.find(f'check("{stage}")').index).text


def graded(notebook: Path) -> dict[str, Any]:
    """Return the report of `ringlab grade NOTEBOOK --json` on the one submission."""
    command = [str(Path(sys.executable).parent / "ringlab"), "grade", str(notebook), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    report = json.loads(run.stdout)
    assert run.returncode == (0 if report["ok"] else 1), run.stderr
    (found,) = report["submissions"]
    return found


def runs_on_real_processes(notebook: Path) -> None:
    """The saved function gives the same bits on 2 processes as on 2 virtual ranks."""
    ring_forward = saved_function(notebook, "ring_forward")
    layout, qkv = contiguous(512, 2), corpus.qkv(512, heads=2, head_dim=32)

    def program(ring):
        return ring_forward(ring, *layout.shard(qkv, ring.rank))

    virtual, real = VirtualCluster(2).run(program), launch(program, 2)
    for expected, got in zip(virtual.results, real.results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert virtual.trace.rounds(0) == real.trace.rounds(0) == 1
    assert virtual.trace.bytes_sent(0) == real.trace.bytes_sent(0) == 2 * 2 * 256 * 32 * 4


def saved_function(notebook: Path, name: str) -> Callable[..., Any]:
    """Return a function of the graded cells; it can use the notebook's imports, but no other cells."""
    cells = [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    namespace: dict[str, Any] = {"__name__": "learner"}
    for cell in (cells[0], *(cell for cell in cells if cell.metadata.get("grade"))):
        exec(cell.source, namespace)
    return namespace[name]


def flat(text: str) -> str:
    """Return the text without line breaks, which depend on the width of the output."""
    return " ".join(text.split())
