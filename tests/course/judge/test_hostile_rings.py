"""Hostile ring programs earn only what they do honestly, and a right ring graded after them earns everything."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from dataclasses import replace
from unittest import mock

import pytest
import torch

from ringlab_course.checking.answers import compare_with
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.in_process import InProcessSubject
from ringlab_course.checking.protocol import FrameReader, ProtocolError
from ringlab_course.checking.reports import run_stage
from ringlab_course.judge import exchanges, network, worker
from ringlab_course.judge.channel import Channel
from ringlab_course.judge.deadline import Deadline
from ringlab_course.judge.process import Endless, WorkerProcess
from ringlab_course.judge.session import SandboxedSubject, Session
from tests.course.judge.hostile import rings
from tests.course.judge.hostile.rings import SUBMISSIONS
from tests.course.judge.hostile.small import own
from tests.course.judge.small_contract import HINTS, RIGHT_RING, marked, mine, turn

pytestmark = [pytest.mark.thorough, pytest.mark.needs_bwrap]
SECONDS = 1.5
"""The time limit of a call of submissions that never end. Other submissions have a minute."""


def _values(subject, rng):
    shards = [torch.from_numpy(rng.standard_normal((1, 1, 4, 8))) for _ in range(2)]
    outcome = subject.run_ring(2, shards)
    for answer in outcome.results:
        compare_with(answer, sum(shards).numpy(), bound=1e-12)
    return outcome.trace


def _by_the_ring(subject, rng) -> None:
    trace = _values(subject, rng)
    for rank in range(2):
        if (trace.rounds(rank), trace.bytes_sent(rank), trace.peers(rank)) != (1, 4 * 8 * 8, {1 - rank}):
            raise Failure("One exchange with the next rank is enough.")


STAGE = Stage(
    id="90.ring", function="ring_sum", title="ring sum", hints=HINTS, kind="ring",
    checks=(
        Check("ring", 3, "visible", "one exchange with the next rank", _by_the_ring),
        Check("values", 2, "visible", "both ranks have the sum", _values),
    ),
)  # fmt: skip


class Rings:
    """One session with all submissions under different names, because ranks with torch start slowly."""

    def __init__(self) -> None:
        self.mark = f"ring-{os.getpid()}-"
        self.functions = {name: f"ring_sum_{number}" for number, name in enumerate(SUBMISSIONS)}
        cells = [
            own(source.replace("@MARK@", self.mark), n) for n, (source, _) in enumerate(SUBMISSIONS.values())
        ]
        names = [*self.functions.values(), "ring_sum"]
        self.session = Session([*cells, RIGHT_RING], names, torch=True, seconds=60, total_seconds=900)

    def forgive(self) -> None:
        self.session.losses, self.session.overdue, self.session.condemned, self.session.seconds = 0, 0, "", 60

    def earned(self, stage: Stage, function: str, seconds: float) -> int:
        """Clear the session's record of losses and attacks, and return the points that `function` earns."""
        self.forgive()
        self.session.workers(2)
        self.session.seconds = seconds
        report = run_stage(
            replace(stage, function=function), SandboxedSubject(self.session, function), "all", seed=3
        )
        assert not any(check.broken for check in report.checks)
        return 0 if self.session.condemned else report.earned


@pytest.fixture(scope="module")
def handed_in():
    first, there = turn(), Rings()
    with there.session:
        yield there
    assert not mine(first)


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_hostile_rings_earn_what_is_honest_in_them(handed_in, name) -> None:
    endless = name in rings.STAYING
    handed_in.forgive()
    handed_in.session.workers(2)
    stage = replace(STAGE, checks=STAGE.checks[1:]) if endless or name in rings.LIVE else STAGE
    earned = handed_in.earned(stage, handed_in.functions[name], SECONDS if endless else 60)
    assert earned == SUBMISSIONS[name][1]
    assert bool(handed_in.session.condemned) == (name in rings.LIVE)
    assert marked(handed_in.mark) == []


def test_after_all_of_them_a_right_ring_earns_everything(handed_in) -> None:
    assert handed_in.earned(STAGE, "ring_sum", 60) == STAGE.points


def test_a_wire_between_ranks_would_earn_everything() -> None:
    """The submission that uses a global earns all points if the ranks are threads of one process."""
    namespace: dict = {}
    exec(SUBMISSIONS["keeps it in a global of the module"][0], namespace)
    assert run_stage(STAGE, InProcessSubject(STAGE, namespace), "all", seed=3).earned == STAGE.points


class Rank:
    """A stand-in for a worker: a thread of this process with the interface that the judge's network uses."""

    send, read_available = WorkerProcess.send, WorkerProcess.read_available

    def __init__(self, namespace: dict) -> None:
        self.socket, theirs = socket.socketpair()
        self.reader, self.frames = FrameReader(), []
        self.thread = threading.Thread(target=self.work, args=(Channel(theirs.detach()), namespace))
        self.thread.start()

    def computed(self) -> float:
        return 0.0

    clock = computed

    def work(self, channel: Channel, namespace: dict) -> None:
        with contextlib.suppress(OSError, SystemExit):  # raised when the judge has ended
            frame = channel.receive()
            channel.call = frame.fields["call"]
            worker._answer(channel, frame, namespace)
            channel.receive()

    def peak(self) -> int:
        return 0

    resident = reset_peak = beyond = code = peak

    def end(self) -> None:
        self.socket.close()
        self.thread.join()


@pytest.mark.parametrize("name", rings.FORGERS)
def test_forged_frames_break_the_protocol(name) -> None:
    with pytest.raises(ProtocolError):
        run(rings.FORGERS[name])


@pytest.mark.parametrize("name", rings.BOUNDED)
def test_what_does_not_end_is_ended_and_is_no_forgery(monkeypatch, name) -> None:
    monkeypatch.setattr(network, "QUEUED_BYTES", 1 << 23)
    monkeypatch.setattr(exchanges, "EXCHANGES", 1000)
    with pytest.raises(Endless):
        run(rings.BOUNDED[name])


def run(source: str) -> None:
    """Run a ring program on two ranks that are threads of this process."""
    namespace: dict = {}
    exec(source, namespace)
    ranks = [Rank(namespace), Rank(namespace)]
    try:
        with mock.patch.object(sys, "argv", ["-", "worker", "-", "torch"]):  # a worker's arguments
            network.Network(ranks, 1, Deadline(60)).run("ring_sum", [(torch.zeros(4, 8),)] * 2, {})
    finally:
        for rank in ranks:
            rank.end()
