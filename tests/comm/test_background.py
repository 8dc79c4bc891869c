"""Background transfers and pieces of messages keep their order, and `launch` stops only ranks that hear nothing.

After each failure, the ranks that have not yet noticed it get a new time limit.
"""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab.comm.processes import background, children
from ringlab.comm.processes.background import Lane, as_bytes, copy
from ringlab.comm.processes.children import GRACE, Children
from ringlab.comm.processes.symmetric import pieces
from ringlab.errors import MismatchError

LONG = 60.0
"""Seconds, enough even if the machine stands still for a while."""


def test_jobs_run_in_order_beside_the_program() -> None:
    lane, seen, gate = Lane("test"), [], threading.Event()
    first = lane.submit(lambda: (gate.wait(), seen.append(1)), [])
    second = lane.submit(lambda: seen.append(2), [])
    assert seen == []
    with pytest.raises(RuntimeError, match="timed out after"):
        second.wait(0.01)
    gate.set()
    second.wait(LONG)
    first.wait(0)
    assert seen == [1, 2]
    lane.close()
    lane._thread.join(LONG)
    assert not lane._thread.is_alive()


def fail(error: Exception) -> None:
    raise error


def test_after_a_failure_every_later_job_fails_with_it() -> None:
    lane, seen = Lane("test"), []
    broken = lane.submit(lambda: fail(RuntimeError("the connection closed")), [])
    later = lane.submit(lambda: seen.append("ran"), [])
    for job in (broken, later):
        with pytest.raises(RuntimeError, match="the connection closed"):
            job.wait(LONG)
    assert seen == []
    lane.close()


def test_a_mismatch_is_the_error_of_one_message_only() -> None:
    lane, seen = Lane("test"), []
    with pytest.raises(MismatchError):
        lane.submit(lambda: fail(MismatchError("a")), []).wait(LONG)
    lane.submit(lambda: seen.append("ran"), []).wait(LONG)
    assert seen == ["ran"]
    lane.close()


def test_a_lane_does_not_hold_the_tensors_of_its_last_job() -> None:
    lane, tensor = Lane("test"), torch.zeros(3)
    gone = weakref.ref(tensor)
    job = lane.submit(lambda tensor=tensor: tensor.add_(1), [tensor])
    job.wait(LONG)
    del tensor
    lane.submit(lambda: None, []).wait(LONG)
    gc.collect()
    assert gone() is None
    lane.close()


def test_a_job_that_is_over_holds_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished job drops its tensors before it signals its end, so that memory counts are repeatable."""
    lane, tensor, gate, held = Lane("test"), torch.zeros(3), threading.Event(), []
    seen = weakref.ref(tensor)

    class Over(threading.Event):
        def set(self) -> None:
            held.append(seen() is not None)
            super().set()

    monkeypatch.setattr(background, "threading", SimpleNamespace(Event=Over))
    job = lane.submit(lambda tensor=tensor: (gate.wait(), tensor.add_(1)), [tensor])
    del tensor
    gate.set()
    job.wait(LONG)
    assert held == [False]
    lane.close()


SHAPES = st.lists(st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.bool]), st.integers(0, 9)))


@given(SHAPES, st.integers(1, 40))
def test_pieces_are_all_bytes_in_order_and_no_longer_than_allowed(
    made: list[tuple[torch.dtype, int]], nbytes: int
) -> None:
    tensors = [torch.arange(count).to(dtype) for dtype, count in made]
    cut = list(pieces(tensors, nbytes))
    whole = torch.cat([as_bytes(t) for t in tensors] or [torch.empty(0, dtype=torch.uint8)])
    flat = [part for piece in cut for part in piece]
    assert torch.equal(torch.cat(flat) if flat else whole[:0], whole)
    lengths = [sum(map(len, piece)) for piece in cut]
    assert len(cut) == -(-len(whole) // nbytes), (
        "the receiver computes the number of pieces from the header's bytes"
    )
    assert all(length == nbytes for length in lengths[:-1])
    assert all(len(part) for part in flat)


def test_pieces_are_views_so_that_filling_them_fills_the_tensors() -> None:
    tensors = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int16)]
    for piece in pieces(tensors, 5):
        for part in piece:
            copy(torch.full_like(part, 255), part)
    assert tensors[0].isnan().all()
    assert (tensors[1] == -1).all()


NEVER = float("inf")


class Scripted:
    """A rank that reports an error at a given second of the clock, or runs for ever."""

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
    """Return the ranks that were stopped before they failed. Rank i fails at `fails_at[i]`, in seconds.

    At `stands_still` the clock jumps by 30 s.
    """
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
    """No rank is stopped while the failure of rank 0 spreads from rank to rank, even in a long ring."""
    assert stopped(monkeypatch, 1.0, 3.0, 5.0, 7.0, 9.0, 11.0) == []
    assert stopped(monkeypatch, 1.0, 1.0 + 0.9 * GRACE, 1.0 + 1.8 * GRACE) == []


def test_who_hears_nothing_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stopped(monkeypatch, 1.0, NEVER) == [1]
    assert stopped(monkeypatch, 1.0, 3.0, 3.0 + GRACE + 1.0, NEVER) == [2, 3]


def test_while_the_machine_stands_still_nobodys_time_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standstill of the machine costs the ranks no time, because they could not run during it either."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(children, "time", SimpleNamespace(monotonic=lambda: clock.now))
    ours = children.Clock()
    for seconds, counted in ((0.25, 0.25), (30.0, 1.25), (0.5, 1.75)):
        clock.now += seconds
        assert ours.tick() == counted
    assert stopped(monkeypatch, 1.0, 32.5, stands_still=2.0) == []
