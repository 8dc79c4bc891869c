"""The ring of lessons and the map of papers show what the catalogue says."""

from __future__ import annotations

import base64

import pytest

from ringlab.errors import CourseError
from ringlab.viz.style import BLUE, PAPER, png
from ringlab_course.catalogue import LESSONS, PAPERS
from ringlab_course.figures import course_ring, papers


def texts(figure):
    return [t.get_text() for axes in figure.axes for t in axes.texts]


def boxes(figure):
    """Return the fill colour of each boxed text by its text."""
    from matplotlib.colors import to_hex

    found = {}
    for text in figure.axes[0].texts:
        if text.get_bbox_patch() is not None:
            found[text.get_text()] = to_hex(text.get_bbox_patch().get_facecolor()).upper()
    return found


def test_the_papers_of_done_lessons_are_lit_and_no_others():
    fills = boxes(papers.draw_papers(("01", "05")))
    lit = {text.rsplit("\n", 1)[0] for text, fill in fills.items() if fill == BLUE.upper()}
    assert lit == {"Transformer", "Ring Attention"}
    assert len(fills) == len(PAPERS) and list(fills.values()).count(PAPER) == len(PAPERS) - 2


def test_the_map_in_words_names_every_paper():
    words = papers.describe_papers(("01",))
    assert all(paper.arxiv in words for paper in PAPERS)
    assert words.count("[lit]") == 1 and words.count("[dark]") == len(PAPERS) - 1


def test_the_map_refuses_a_lesson_that_does_not_exist():
    with pytest.raises(CourseError):
        papers.paper_map(("99",))


def test_the_ring_shows_all_lessons_and_names_the_way_to_the_chosen_one():
    shown = texts(course_ring.draw_course("05"))
    assert {item.id for item in LESSONS} <= set(shown)
    assert {"Online softmax", "Tiled attention", "The emulated ring"} <= set(shown)
    assert "Numerics" not in shown
    assert course_ring.all_needs("05") == ("00", "01", "02", "03") and course_ring.all_needs("00") == ()


@pytest.mark.parametrize("item", LESSONS, ids=lambda item: item.id)
def test_the_picture_in_words(item):
    words = course_ring.describe_lesson(item.id)
    assert item.title in words and item.afterwards in words


def drawn(lesson_id):
    return base64.b64encode(png(course_ring.draw_course(lesson_id))).decode()


def test_the_slider_changes_picture_and_words(monkeypatch):
    shown = []
    monkeypatch.setattr(course_ring, "is_live", lambda: True)
    monkeypatch.setattr("IPython.display.display", shown.append)
    course_ring.course_ring("05")
    slider, picture = shown[0].children
    assert "The emulated ring" in picture.value and drawn("05") in picture.value
    slider.value = "08"
    assert "Striped and zig-zag" in picture.value and drawn("08") in picture.value


def test_without_a_person_there_is_one_picture_with_its_words(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *a, **k: shown.append(k))
    course_ring.course_ring("03")
    papers.paper_map(("01",))
    assert "Tiled attention" in shown[0]["metadata"]["image/png"]["alt"]
    assert "1 of them lit" in shown[1]["metadata"]["image/png"]["alt"]
