"""Lines that do the same job are found in both programs, and a picture that has drifted from them is an error."""

from __future__ import annotations

import pytest

from ringlab.errors import CourseError
from ringlab.viz.style import png
from ringlab_course.figures import side_by_side
from ringlab_course.figures.side_by_side import Job
from tests.viz.legible import illegible

LEFT = '''
def ring(x):
    """What it returns."""
    total = 0

    for step in range(3):
        total = add(total, x)
    return total
'''
RIGHT = "def mesh(x):\n    total = nothing()\n    total = plus(total, x)\n    total = plus(total, x)\n    return total\n"
JOBS = (Job("begin", ("total = 0",), ("nothing",)), Job("add", ("add(",), ("plus(",)))
NAMES = ("left", "right")


def test_the_words_pair_the_lines_that_do_the_same() -> None:
    words = side_by_side.describe(NAMES, (LEFT, RIGHT), JOBS)
    assert "1, begin. left: total = 0. right: total = nothing()." in words
    assert "2, add. left: total = add(total, x). right: total = plus(total, x)." in words


def test_every_line_but_docstrings_is_drawn_and_every_job_has_its_number() -> None:
    drawn = side_by_side.figure(NAMES, (LEFT, RIGHT), JOBS)
    texts = [text.get_text() for text in drawn.axes[0].texts]
    assert {"def ring(x):", "    for step in range(3):", "def mesh(x):", "left", "right"} <= set(texts)
    assert not any("What it returns" in text for text in texts)
    assert texts.count("1") == texts.count("2") == 2
    assert len(drawn.axes[0].patches) == 2 * (2 + 1)  # a band on each side, and a ribbon
    assert len(png(drawn)) > 1000


def test_bands_lie_on_the_lines_of_their_job() -> None:
    ax = side_by_side.figure(NAMES, (LEFT, RIGHT), JOBS).axes[0]
    row = {text.get_text(): text.get_position()[1] for text in ax.texts}
    bands = sorted(patch.get_y() + patch.get_height() / 2 for patch in ax.patches if hasattr(patch, "get_y"))
    wanted = [
        row[line] for line in ("    total = 0", "        total = add(total, x)", "    total = nothing()")
    ]
    assert {round(y, 6) for y in wanted} <= {round(y, 6) for y in bands}


def test_the_text_fits_its_column() -> None:
    assert illegible(side_by_side.figure(NAMES, (LEFT, RIGHT), JOBS)) == []


@pytest.mark.parametrize("jobs", [(Job("x", ("gone",), ("plus",)),), (Job("x", ("add(",), ("gone",)),)])
@pytest.mark.parametrize("draw", [side_by_side.figure, side_by_side.describe])
def test_a_job_that_a_program_no_longer_does_is_an_error(jobs, draw) -> None:
    with pytest.raises(CourseError, match="gone"):
        draw(NAMES, (LEFT, RIGHT), jobs)
