"""Profiler lanes: what is drawn and said of them is what they are."""

from __future__ import annotations

import pytest

from ringlab.errors import CommError
from ringlab.viz.lanes import Span
from ringlab_course.figures import profiler_lanes

LANES = [
    Span(0, "compute", "a", 0.0, 0.004),
    Span(0, "copy", "b", 0.003, 0.006),
    Span(1, "compute", "a", 0.0, 0.010),
    Span(1, "copy", "b", 0.002, 0.003),
]
RUNS = {"one": LANES, "other": LANES[:2]}


def bars(axes, look):
    return [len(c.get_paths()) for c in axes.collections if (c.get_gid() or "").startswith(look)]


def test_every_rank_has_two_lanes_and_what_is_exposed_is_hatched():
    above, below = profiler_lanes.figure(RUNS).axes
    assert [label.get_text() for label in above.get_yticklabels()] == [
        "rank 0  compute",
        "copy",
        "rank 1  compute",
        "copy",
    ]
    assert bars(above, "compute") == [1, 1] and bars(above, "copy") == [1, 1]
    assert bars(above, "exposed") == [1] and len(below.get_yticks()) == 2
    assert {text.get_text() for text in above.texts} == {"33% hidden", "100% hidden"}


def test_steps_that_touch_stay_apart_and_bear_their_numbers():
    steps = [Span(0, "compute", f"attend {step}", step, step + 1.0) for step in range(3)]
    (only,) = profiler_lanes.figure({"one": [*steps, Span(0, "copy", "kv 0", 0.0, 2.0)]}).axes
    assert bars(only, "compute") == [3]
    assert [text.get_text() for text in only.texts if text.get_text().isdigit()] == ["0", "1", "2"]


def test_one_rank_alone_is_drawn_and_told():
    (only,) = profiler_lanes.figure({"one": LANES}, rank=1).axes
    assert len(only.get_yticks()) == 2
    told = profiler_lanes.describe({"one": LANES}, rank=1)
    assert told == "one, over after 10 ms: rank 1 computes 10 ms and copies 1 ms, 0 ms of it exposed."


def test_what_is_not_there_is_refused_by_name():
    with pytest.raises(CommError, match="a rank among"):
        profiler_lanes.figure(RUNS, rank=2)
    with pytest.raises(CommError, match="a profile with spans"):
        profiler_lanes.describe({"empty": []})


def test_buttons_choose_the_rank():
    which, picture = profiler_lanes.player({"one": LANES}).children
    assert list(which.options) == ["all ranks", "rank 0", "rank 1"]
    assert "rank 0 computes" in picture.value and "rank 1 computes" in picture.value
    which.value = "rank 1"
    assert "rank 0 computes" not in picture.value


def test_nobody_there_to_press_a_button_sees_all_ranks(monkeypatch):
    seen = []
    monkeypatch.setattr(profiler_lanes, "show", lambda figure, alt: seen.append(alt))
    profiler_lanes.play(RUNS)
    assert seen == [profiler_lanes.describe(RUNS)]
