"""The ring of lessons and the map of papers show what the catalogue says.

Lines that do the same job are found in both programs, and a picture that has drifted from them is an error.

Loss curves on top of each other: what is said about them is what they are.

Tokens are traded for heads so that each piece has one holder, before and after.

The kill matrix shows, by sign as well as by colour, what the findings say; all of it can be moved by keys.
"""

from __future__ import annotations

import base64
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab import striped
from ringlab.conformance.runner import Finding
from ringlab.errors import CourseError
from ringlab.nn import Degrees
from ringlab.viz.style import BLUE, png
from ringlab_course.catalogue import LESSONS, PAPERS
from ringlab_course.clinic.suite import KillMatrix
from ringlab_course.figures import (
    course_ring,
    exchanges,
    kill_matrix,
    loss_curves,
    memory_ledger,
    papers,
    ring_step,
    side_by_side,
    step_report,
)
from ringlab_course.figures.side_by_side import Job
from tests.viz.test_keyboard import faults
from tests.viz.test_style import illegible


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


def test_the_map_has_a_box_for_every_paper_and_fills_that_of_the_course():
    fills = boxes(papers.draw_papers())
    filled = [text for text, fill in fills.items() if fill == BLUE.upper()]
    assert len(fills) == len(PAPERS) and len(filled) == 1
    assert filled[0].startswith("Ring Attention\n2023, arXiv 2310.01889\n") and "lessons 05, 06" in filled[0]


def test_the_map_in_words_names_every_paper():
    words = papers.describe_papers()
    assert all(paper.arxiv in words and papers.explained_in(paper) in words for paper in PAPERS)


def test_arrows_of_the_map_lead_down():
    places = papers._PLACES
    assert all(places[source][1] > places[paper.key][1] for paper in PAPERS for source in paper.after)


def test_every_word_of_both_maps_can_be_read():
    assert illegible(papers.draw_papers()) == []
    for chosen in ("00", "05", "17"):
        assert illegible(course_ring.draw_course(chosen)) == []


def test_the_ring_shows_all_lessons_and_names_the_way_to_the_chosen_one():
    shown = texts(course_ring.draw_course("05"))
    assert {item.id for item in LESSONS} <= set(shown)
    bold = {t.get_text() for t in course_ring.draw_course("05").axes[0].texts if t.get_weight() == "bold"}
    assert {"Online softmax", "Tiled attention", "The emulated ring"} <= bold
    assert "Numerics" in shown and "Numerics" not in bold
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
    papers.paper_map()
    assert "Tiled attention" in shown[0]["metadata"]["image/png"]["alt"]
    assert f"{len(PAPERS)} papers" in shown[1]["metadata"]["image/png"]["alt"]


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
    assert texts.count("1") == texts.count("2") == 3 and {"begin", "add"} <= set(texts)
    assert len(drawn.axes[0].patches) == 2 * (2 + 1 + 1)  # two bands, a ribbon, a key
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


LOSSES = st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6)


@given(LOSSES, st.floats(1e-4, 1.0), st.data())
def test_a_curve_that_leaves_is_told_from_one_that_lies_on_the_first(losses, far, data):
    step = data.draw(st.integers(0, len(losses) - 1))
    left = [loss * (1 + (far if number == step else 1e-7)) for number, loss in enumerate(losses)]
    curves = {"one": losses, "near": [loss * (1 + 1e-7) for loss in losses], "left": left}
    found = loss_curves.differences(curves)
    assert max(found["left"]) == pytest.approx(far, rel=1e-6) and max(found["near"]) < 1e-6
    told = loss_curves.describe(curves, "Title")
    assert "near lies on it" in told and f"left leaves it in step {step + 1}." in told


def test_the_recorded_curves_are_there_with_their_machine_and_are_drawn():
    record = loss_curves.recorded()
    assert all(len(losses) == 200 for losses in record.curves.values()) and len(record.curves) == 4
    assert "cores" in record.machine and "torch" in record.machine
    above, below = loss_curves.figure(record.curves, "Title").axes
    assert [line.get_label() for line in above.get_lines()] == list(record.curves)
    assert below.get_yscale() == "log"


def test_equal_bits_have_a_place_in_the_picture():
    drawn = loss_curves.figure({"one": [2.0, 1.0], "other": [2.0, 1.0]}, "Title").axes[1]
    assert min(drawn.get_lines()[0].get_ydata()) == loss_curves.FLOOR >= drawn.get_ylim()[0]


def test_nobody_there_to_press_a_button_is_told_all_cases(capsys):
    loss_curves.play({"a": {"one": [2.0, 1.0], "a": [2.0, 1.0]}, "b": {"one": [2.0, 1.0], "b": [2.0, 1.5]}})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("a.") and "lies on it" in first and "b leaves it in step 2." in second


def test_buttons_choose_what_is_drawn():
    cases = {"a": {"one": [2.0, 1.0], "a": [2.0, 1.0]}, "b": {"one": [2.0, 1.0], "b": [2.0, 1.5]}}
    which, picture = loss_curves.player(cases).children
    assert "lies on it" in picture.value
    which.value = "b"
    assert "leaves it in step 2" in picture.value


NONE = "does not apply: no gradients"


def finding(name: str, ok: bool | None) -> Finding:
    return Finding(name, f"asks for {name}", ok is not False, NONE if ok is None else f"saw {ok} < 1", 0.0, ok is not None)  # fmt: skip


MATRIX = KillMatrix(
    ("ash", "elm"),
    ("masks", "dq", "bytes"),
    {
        "ash": {c: finding(c, ok) for c, ok in (("masks", False), ("dq", None), ("bytes", True))},
        "elm": {c: finding(c, ok) for c, ok in (("masks", True), ("dq", None), ("bytes", False))},
    },
)


def test_a_finding_that_does_not_apply_is_neither_found_nor_held() -> None:
    assert [MATRIX.finds("ash", check) for check in MATRIX.checks] == [True, None, False]
    assert MATRIX.found_by("elm") == ["bytes"]


def test_the_table_says_by_sign_what_each_cell_is_and_picks_one_out() -> None:
    text = kill_matrix.table(MATRIX, 0, 2)
    signs = re.findall(r"<td [^>]*>(.)</td>", text)
    assert signs == ["●", "–", "·", "·", "–", "●"]
    assert len(re.findall("3px solid", text)) == 1
    assert "ash × bytes: the check holds" in text and "saw True &lt; 1" in text


def test_the_static_figure_is_legible_and_its_words_name_every_patient() -> None:
    drawn = kill_matrix.figure(MATRIX)
    assert illegible(drawn) == []
    assert png(drawn) == png(kill_matrix.figure(MATRIX))
    texts = [text.get_text() for text in drawn.axes[0].texts]
    assert texts == ["●", "–", "·", "·", "–", "●"]
    assert kill_matrix.describe(MATRIX) == "ash: found by masks. elm: found by bytes."


def test_arrow_keys_move_both_sliders_and_the_evidence_follows() -> None:
    pytest.importorskip("ipywidgets")
    player = kill_matrix.player(MATRIX)
    patient, check, picture = player.children
    assert faults(player) == []
    assert "ash × masks: the check finds it" in picture.value
    patient.value, check.value = 1, 2
    assert "elm × bytes: the check finds it" in picture.value
    check.value = 1
    assert "elm × dq: the check does not apply" in picture.value


def test_without_a_person_it_says_where_the_matrix_stands(capsys: pytest.CaptureFixture[str]) -> None:
    kill_matrix.play(MATRIX)
    assert "is below" in capsys.readouterr().out


KNOWN = [[(rank - step) % 4 + 10 for step in range(4)] for rank in range(4)]
SEGMENT = striped(64, 4), 1, 3, (9, 16), (0, 8, 15, -1)
FOUR = ring_step.layouts_at(1024, 4, rank=1, step=1)
STEPS = {"ring": (3, 180e-6, 100e-6), "rows of 2": (1, 180e-6, 200e-6)}
DISTANCES = {"contiguous": np.array([[0, np.nan], [1, 0]]), "zigzag": np.array([[0.5, 1], [1, 0]])}
LADDER = {"block + merge": [(96, 36)] * 4, "carried": [(48, 20)] * 4, "first and last": [(40, 15)] * 4}


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        (course_ring.draw_notes(KNOWN), course_ring.describe_notes(KNOWN)),
        (memory_ledger.shapes_figure(), memory_ledger.describe_shapes()),
        (memory_ledger.sharing_figure(8, 2), memory_ledger.describe_sharing(8, 2)),
        (step_report.traffic(LADDER, 4), step_report.describe_traffic(LADDER, 4)),
        (step_report.segment(*SEGMENT), step_report.describe_segment(*SEGMENT)),
        (ring_step.grid(FOUR), ring_step.describe_grid(FOUR)),
        (exchanges.trade(), exchanges.describe_trade()),
        (exchanges.schedules(), exchanges.describe_schedules()),
        (exchanges.decode_step([64, 64, 63]), exchanges.describe_decode_step([64, 64, 63])),
        (exchanges.steps(STEPS), exchanges.describe_steps(STEPS)),
        (loss_curves.shares(), loss_curves.describe_shares()),
        (loss_curves.distances(DISTANCES), loss_curves.describe_distances(DISTANCES)),
        (loss_curves.mesh(Degrees(dp=2, cp=2, tp=2)), loss_curves.describe_mesh(Degrees(dp=2, cp=2, tp=2))),
    ],
    ids=[
        "notes",
        "shapes",
        "sharing",
        "traffic",
        "segment",
        "tiles",
        "trade",
        "schedules",
        "decode",
        "steps",
        "shares",
        "distances",
        "mesh",
    ],
)
def test_a_still_picture_can_be_read_and_has_words(figure, words):
    assert illegible(figure) == []
    assert len(words) > 60


def test_the_grid_of_notes_shows_each_note_at_each_rank_and_step():
    shown = texts(course_ring.draw_notes(KNOWN))
    assert all(
        sum(text.endswith(str(note)) for text in shown) >= 4 for note in {n for row in KNOWN for n in row}
    )


def test_words_on_heads_that_share_say_which_order_is_wrong():
    words = memory_ledger.describe_sharing(8, 2)
    assert "repeat" in words and "tile" in words


def test_an_all_to_all_sends_one_piece_from_each_rank_to_each() -> None:
    before, after = exchanges.holders().values()
    assert sorted(zip(before.ravel(), after.ravel(), strict=True)) == [
        (a, b) for a in range(4) for b in range(4)
    ]
    assert (before[2, 1], after[2, 1]) == (1, 2)  # the piece in the frame
    numbers = [[text.get_text() for text in axes.texts] for axes in exchanges.trade().axes]
    assert numbers == [[str(rank) for rank in grid.ravel()] for grid in (before, after)]


@pytest.mark.parametrize("name", exchanges.panels())
def test_every_schedule_computes_a_quarter_and_needs_the_other_keys_of_its_heads(name) -> None:
    grid = exchanges.panels()[name]
    heads = grid.any(axis=1)
    computed = (grid == exchanges.OWN) | (grid == exchanges.TRADED)
    assert computed.sum() == grid.size // 4 and grid[heads].all()
    assert (grid[:, 4:8][heads] == exchanges.OWN).all()


def test_each_rank_shows_how_many_keys_it_has() -> None:
    shown = texts(exchanges.decode_step([64, 64, 63]))
    assert [text for text in shown if "keys" in text] == [f"{n} keys, values" for n in (64, 64, 63)]
    assert shown.count("out, lse") == 3 and shown.count("merged out") == 3


def test_what_a_hop_exposes_is_its_length_less_the_block() -> None:
    figure = exchanges.steps(STEPS)
    shown = texts(figure)
    assert "3 × 80 µs exposed" in shown and "hop hidden" in shown
    widths = sorted(round(bar.get_width()) for bar in figure.axes[0].patches)
    assert widths == [80, 100, 180, 180, 200]
