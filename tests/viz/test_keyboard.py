"""Every control of the cost pictures' widgets has a name and can be reached and moved by keys alone.

Widgets are shown in a live notebook only; elsewhere their static form is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ringlab.comm.trace import Compute, Trace
from ringlab.viz import frontend, gantt
from ringlab_course.figures import decision_map, layout_view, overlap_view

pytestmark = pytest.mark.thorough

ipywidgets = pytest.importorskip("ipywidgets")

OPERABLE = (
    ipywidgets.IntSlider,
    ipywidgets.SelectionSlider,
    ipywidgets.FloatLogSlider,
    ipywidgets.ToggleButtons,
    ipywidgets.Checkbox,
    ipywidgets.Play,
)
"""Widgets that keys can move. A drop-down list is not one of them, because JupyterLab takes its arrow keys."""
NAMED_BY_THEMSELVES = (ipywidgets.ToggleButtons, ipywidgets.Play)
SHOWN = (ipywidgets.HTML, ipywidgets.Label)


def controls(widget: Any) -> Iterator[Any]:
    """Yield every widget inside `widget` that takes input."""
    for child in getattr(widget, "children", ()):
        yield from controls(child)
    if not isinstance(widget, (ipywidgets.Box, *SHOWN)):
        yield widget


def faults(widget: Any) -> list[str]:
    """Return a line for each control that keys cannot move or that has no name."""
    lines = [f"{type(c).__name__} is not for keys" for c in controls(widget) if not isinstance(c, OPERABLE)]
    lines += [
        f"{type(c).__name__} has no name"
        for c in controls(widget)
        if not isinstance(c, NAMED_BY_THEMSELVES) and not c.description
    ]
    return lines


TRACES = {name: Trace(1, [Compute(0, "attend 0", 0.0, 1.0)]) for name in ("a", "b")}
PLAYERS: dict[str, Callable[[], Any]] = {
    "gantt": lambda: gantt.player(TRACES),
    "steps": lambda: frontend.step_player(["<b>0</b>", "<b>1</b>"], "step"),
    "layout_view": lambda: layout_view.player(S=16, P=2),
    "overlap_view": overlap_view.player,
    "decision_map": decision_map.player,
}


@pytest.mark.parametrize("name", PLAYERS)
def test_keys_are_enough(name: str) -> None:
    player = PLAYERS[name]()
    assert faults(player) == [] and len(list(controls(player))) >= 2


@pytest.mark.parametrize("live", [True, False])
def test_steps_are_played_to_people_and_recorded_for_the_site(
    monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(frontend, "is_live", lambda: live)
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    frontend.play_steps(lambda: ["<b>0</b>", "<b>1</b>"], "block", {"text/plain": "two"}, names=(1, 2))
    if live:
        assert shown[0].children[1].value == "<b>0</b>"
    else:
        frames = {"step": "block", "names": ["1", "2"], "pictures": ["<b>0</b>", "<b>1</b>"]}
        assert shown == [{"text/plain": "two", frontend.FRAMES: frames}]
