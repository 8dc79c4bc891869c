"""How `launch` ends its ranks: each that fails gives those who have not yet heard of it as long again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringlab.comm.processes import children
from ringlab.comm.processes.children import GRACE, Children

NEVER = float("inf")


class Scripted:
    """A rank that reports an error at a second of the clock, or goes on for ever."""

    def __init__(self, clock: SimpleNamespace, rank: int, fails_at: float) -> None:
        self.clock, self.rank, self.fails_at = clock, rank, fails_at
        self.killed_because = ""
        self.process = SimpleNamespace(poll=lambda: 1 if self.reported() else None)

    def doing(self) -> str:
        return "connected"

    def reported(self) -> bool:
        return self.clock.now >= self.fails_at

    def overdue(self) -> bool:
        return False

    def kill(self, because: str = "") -> None:
        self.killed_because = because


def stopped(
    monkeypatch: pytest.MonkeyPatch, *fails_at: float, stands_still: float | None = None
) -> list[int]:
    """Return which of the ranks that fail at these seconds are stopped before; for 30 s nothing moves at `stands_still`."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(children, "time", SimpleNamespace(monotonic=lambda: clock.now))
    board: Any = SimpleNamespace(first_failure=lambda: "rank 0 failed first")
    ranks: list[Any] = [Scripted(clock, rank, at) for rank, at in enumerate(fails_at)]
    launched = Children(None, len(ranks), board, {})  # type: ignore[arg-type]
    launched.all, launched.running = ranks, list(ranks)

    def pump(_: float) -> None:
        clock.now += 30.0 if clock.now == stands_still else 0.25

    monkeypatch.setattr(launched.output, "pump", pump)
    launched.supervise(startup=60.0, timeout=60.0)
    return [each.rank for each in ranks if each.killed_because]


def test_news_that_travel_from_rank_to_rank_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 dies; the others hear of it two seconds after the rank before, as on a ring of many."""
    assert stopped(monkeypatch, 1.0, 3.0, 5.0, 7.0, 9.0, 11.0) == []
    assert stopped(monkeypatch, 1.0, 1.0 + 0.9 * GRACE, 1.0 + 1.8 * GRACE) == []


def test_who_hears_nothing_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stopped(monkeypatch, 1.0, NEVER) == [1]
    assert stopped(monkeypatch, 1.0, 3.0, 3.0 + GRACE + 1.0, NEVER) == [2, 3]


def test_while_the_machine_stands_still_nobodys_time_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks could not move either: who was about to speak does so after it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(children, "time", SimpleNamespace(monotonic=lambda: clock.now))
    ours = children.Clock()
    for seconds, counted in ((0.25, 0.25), (30.0, 1.25), (0.5, 1.75)):
        clock.now += seconds
        assert ours.tick() == counted
    assert stopped(monkeypatch, 1.0, 32.5, stands_still=2.0) == []
