"""Widgets are for people: without one, their static form is shown."""

from __future__ import annotations

import pytest

from ringlab.viz import frontend


@pytest.mark.parametrize("live", [True, False])
def test_the_player_is_shown_to_people_only(monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    happened: list[str] = []
    monkeypatch.setattr(frontend, "is_live", lambda: live)
    monkeypatch.setattr("IPython.display.display", happened.append)
    frontend.show_player(lambda: "the player", lambda: happened.append("the still"))
    assert happened == (["the player"] if live else ["the still"])


def test_the_slider_of_a_step_player_changes_the_picture() -> None:
    controls, picture = frontend.step_player(["<b>0</b>", "<b>1</b>", "<b>2</b>"], "block").children
    play, slider = controls.children
    assert (play.max, slider.max, slider.description) == (2, 2, "block") and picture.value == "<b>0</b>"
    slider.value = 2
    assert picture.value == "<b>2</b>"
