"""Lesson 05 works in JupyterLab for a learner without a mouse, and requests nothing from other machines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ringlab_course.catalogue import LESSONS, lesson
from ringlab_course.notebook import predictions
from tests.browser.notebook_page import NotebookPage, arrow, open_notebook, press_button, type_number

pytestmark = [pytest.mark.thorough, pytest.mark.needs_chromium, pytest.mark.slow]

PATH = "notebooks/05_emulated_ring.ipynb"
PICTURE = "img[alt^='Step']"
ROOM = float(predictions.ROOM.removesuffix("px"))
CHECKOUT = Path(__file__).parents[2]
ACTIVE = "index => window.jupyterapp.shell.currentWidget.content.activeCellIndex === index"


@pytest.fixture(scope="module", name="lesson")
def lesson_05(browser, lab) -> NotebookPage:
    """Run the lesson from top to bottom, and answer two prediction questions on the way."""
    notebook = open_notebook(browser.page, PATH)
    number, choice = notebook.find('predict("05.values"'), notebook.find('predict("05.slip"')
    notebook.run_above(number.index + 1)
    notebook.keep_busy(3)  # the kernel is busy, and must still get the next keystrokes and the click in order
    type_number(notebook.select(number.index), "18", told="you predicted: 18 values")
    for index in range(number.index + 1, choice.index + 1):
        notebook.run(index)
    press_button(notebook.select(choice.index), "2", told="you predicted: 2")
    notebook.run_below(choice.index + 1)
    return notebook


# This test runs before all others, because a question takes less room on the page once it is answered.
@pytest.mark.parametrize("lesson_id", [each.id for each in LESSONS[::4]])
def test_no_answer_is_seen_before_its_prediction(browser, lesson_id):
    browser.page.set_viewport_size({"width": 1400, "height": 900})
    notebook = open_notebook(browser.page, f"notebooks/{lesson(lesson_id).slug}.ipynb", kernel=False)
    cells = notebook.cells
    questions = {cell.index: re.findall(r'predict\(\s*"([^"]+)"', cell.source) for cell in cells}
    source = (CHECKOUT / f"ringlab_course/lessons/{lesson(lesson_id).slug}.py").read_text()
    assert sum(map(len, questions.values())) == len(re.findall(r"^predict\(", source, re.MULTILINE)) > 0
    for asked, keys in questions.items():
        for key in keys:
            measured = next(cell for cell in cells if re.search(rf'compare\(\s*"{key}"', cell.source))
            told = next(cell for cell in cells[measured.index + 1 :] if cell.kind == "markdown")
            notebook.select(asked)
            assert notebook.in_window(asked), key
            assert any("measured" in output.get("text", "") for output in measured.outputs), key
            assert notebook.visible(asked + 1, measured.index) == [], key
            assert not notebook.in_window(told.index), (key, told.source)


@pytest.mark.parametrize(
    "lesson_id",
    [
        "05",
    ],
)
def test_after_a_click_on_a_prediction_shift_enter_goes_on(browser, lesson_id):
    notebook = open_notebook(browser.page, f"notebooks/{lesson(lesson_id).slug}.ipynb")
    notebook.run(notebook.find("import").index)
    questions = [cell for cell in notebook.cells if "predict(" in cell.source and "choices=" in cell.source]
    asked = questions[-1]  # the fixture has already answered the first question
    notebook.run(asked.index)
    cell = notebook.select(asked.index)
    cell.locator("button.jupyter-button").last.click()
    cell.get_by_text("you predicted").wait_for()
    browser.page.keyboard.press("Shift+Enter")
    browser.page.wait_for_function(ACTIVE, arg=asked.index + 1)


def test_it_runs_top_to_bottom_without_an_error_or_a_warning(lesson):
    code = [cell for cell in lesson.cells if cell.kind == "code"]
    assert len(code) > 20
    assert [error for cell in code for error in cell.errors] == []
    assert [cell.warnings for cell in code if cell.warnings] == []
    assert "within 1e-5 of SDPA on one device: True" in lesson.find("scaled_dot_product_attention(*text").text


def test_a_prediction_made_by_keyboard_is_kept_and_later_compared(lesson, lab):
    kept = json.loads(lab.progress.read_text())["predictions"]
    assert (kept["05.slip"]["guess"], kept["05.values"]["guess"]) == ("2", 18)
    assert "measured: 2 (you predicted 2: right)" in lesson.find('compare("05.slip"').text
    compared = lesson.find('compare("05.values"').text
    assert "measured: 36 values (you predicted 18 values: too low by a factor of 2)" in compared


def test_the_rings_slider_moves_the_picture_by_keyboard(lesson):
    cell = lesson.select(lesson.find("ring_view.play(").index)
    picture = cell.locator(PICTURE)
    first = picture.get_attribute("src")
    assert picture.get_attribute("alt").startswith("Step 0.")
    arrow(cell, "ArrowRight")
    second = cell.locator("img[alt^='Step 1.']")
    second.wait_for()
    assert second.get_attribute("src") != first
    arrow(cell, "ArrowLeft")
    cell.locator("img[alt^='Step 0.']").wait_for()
    assert picture.get_attribute("src") == first


def test_play_runs_to_the_last_step(lesson):
    cell = lesson.select(lesson.find("ring_view.play(").index)
    play = cell.locator(".widget-play button").first
    play.focus()
    play.press(" ")
    cell.locator("img[alt^='Step 3.']").wait_for()


# This test runs last, so that it sees the addresses that all tests above have requested.
def test_nothing_is_asked_of_another_machine(lesson, browser):
    assert any("/api/kernels" in url for url in browser.asked)
    assert browser.strangers() == []
    assert browser.complaints == []
