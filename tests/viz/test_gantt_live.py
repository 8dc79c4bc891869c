"""A live Gantt chart grows in one place while its ranks run, and ends as the whole chart."""

from __future__ import annotations

import pytest

from ringlab.comm.trace import Compute, Trace
from ringlab.errors import CommError
from ringlab.viz import gantt

pytestmark = pytest.mark.thorough


def one_rank(*ends: float) -> Trace:
    return Trace(1, [Compute(0, f"step {n}", max(0.0, end - 1), end) for n, end in enumerate(ends)])


class Screen:
    """A stand-in for the notebook, which records the displayed content and its updates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
        self.shown: list[dict[str, str]] = []
        monkeypatch.setattr(gantt, "is_live", lambda: live)
        monkeypatch.setattr("IPython.display.display", self.display)

    def display(self, content: dict[str, str], **options: object) -> Screen:
        self.shown.append(content)
        return self

    update = display


@pytest.mark.parametrize("live", [True, False])
def test_a_live_chart_grows_in_one_place_and_ends_as_the_whole_one_with_its_words(monkeypatch, live) -> None:
    screen = Screen(monkeypatch, live)
    with gantt.live("Ring", until=9.0) as watch:
        watch(Trace(1))  # nothing to draw yet
        for ends in ((1.0,), (1.0, 2.0), (1.0, 2.0, 3.0)):
            watch(one_rank(*ends))
    texts = [content["text/plain"] for content in screen.shown]
    assert texts[-1] == gantt.describe(one_rank(1.0, 2.0, 3.0), "Ring")
    if live:
        assert ["so far" in text for text in texts] == [False, True, True, True, False]
        assert 'alt="Ring: 1 rank, ends at 3 s' in screen.shown[-1]["text/html"]
    else:
        assert len(texts) == 1 and screen.shown[-1]["image/png"]


def test_a_live_chart_of_a_run_that_fails_stays_and_the_error_comes_through(monkeypatch) -> None:
    screen = Screen(monkeypatch, live=False)
    with pytest.raises(CommError, match="the run"), gantt.live("Ring") as watch:
        watch(one_rank(1.0))
        raise CommError("the run to end")
    assert "ends at 1 s" in screen.shown[-1]["text/plain"]


def test_a_live_chart_of_a_run_without_events_is_none(monkeypatch) -> None:
    screen = Screen(monkeypatch, live=False)
    with gantt.live("Ring"):
        pass
    assert screen.shown == []
