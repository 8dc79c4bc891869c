"""A run on the judge's network has the results, trace and errors of the virtual cluster."""

from __future__ import annotations

import pytest
import torch

from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.errors import RankFailedError
from ringlab_course.checking.failures import Crashed
from ringlab_course.judge import network
from ringlab_course.judge.session import Condemned, SandboxedSubject, Session
from tests.course.judge.hostile.small import CHANNEL
from tests.course.judge.small_contract import RIGHT_RING, RING_EXERCISE, notebook

pytestmark = pytest.mark.needs_bwrap

PROGRAMS = (
    RIGHT_RING
    + CHANNEL
    + """
import time
import torch
def overlapped(ring, k, v):
    seen = [(k.clone(), v.clone())]
    for step in range(ring.world_size - 1):
        work = ring.post(k, v, tag=f"step {step}")
        total = ring.compute("sum", torch.add, k, v)
        k, v = work.wait()
        seen.append((k, v))
    return [a + b for a, b in seen], ring.origin(1)
def shifts_late(ring, k, v):
    for step in range(ring.world_size - 1):
        ring.compute(f"{step}", torch.add, k, v)
        k, v = ring.shift(k, v)
    return k
def uneven(ring, k, v):
    for step in range(ring.world_size - 1):
        work = ring.post(k, v)
        for _ in range((ring.rank + step) % 3):
            ring.compute(f"{step}", torch.add, k, v)
        k, v = work.wait()
    ring.barrier()
    return k
def collective(ring, x):
    ring.barrier()
    everything = ring.all_gather(x)
    return torch.cat(everything), ring.all_reduce(x, "max")
def one_sided(ring, x):
    return ring.shift(x) if ring.rank != 1 else x
def another_shape_for_one(ring, x):
    mine, buffer = x, torch.empty(8)
    for step in range(3):
        time.sleep({0: 0.6, 2: 0.2}.get(ring.rank, 0.0))  # rank 0 posts when the others have failed already
        work = ring.comm.exchange(send=(mine,), to=ring.next, receive=(buffer,), source=ring.previous, tag=f"step {step}")
        ring.compute("sum", torch.add, mine, mine)
        work.wait()
    return buffer
def wrong_tag(ring, x):
    return ring.shift(x, tag=f"rank {ring.rank}")
def never_waits(ring, x):
    ring.post(x)
    return x
def smuggles(ring, x):
    buffer = torch.empty_like(x)
    ring.comm.exchange(send=(x,), to=ring.next, receive=(buffer,), source=ring.previous, tag="control:hello").wait()
    return buffer
def raises_on_one(ring, x):
    if ring.rank == 1:
        raise KeyError("mine")
    return ring.shift(x)
def fail_together(ring, x, seconds, computations):
    time.sleep(seconds)
    for step in range(computations):
        ring.compute(f"{step}", torch.add, x, x)
    if ring.rank < 2:
        raise KeyError(f"mine {ring.rank}")
    return ring.shift(x)
def lingers(ring, x):
    while ring.rank == 1:
        pass
    return ring.shift(x)
def leaves(ring, x):
    import os
    if ring.rank == 1:
        os._exit(0)
    return ring.shift(x)
def lies(ring, x):
    if ring.rank == 1:
        channel().send("wait", index=7)
    return ring.shift(x)
def holds(ring, x, mib):
    hoard = torch.ones(mib, 1 << 18)
    return hoard.sum().item()
def inside_a_computation(ring, x):
    return ring.compute("both", ring.shift, x)
def reads_too_early(ring, x):
    buffer = torch.ones_like(x)
    work = ring.post(x, into=(buffer,))
    early = buffer.clone()
    return early, work.wait()[0]
def one_buffer(ring, x):
    return ring.post(x, into=(x,)).wait()[0]
def writes_too_early(ring, x):
    work = ring.post(x)
    x[0] += 1
    return work.wait()[0]
"""
)
NAMES = [
    "ring_sum", "overlapped", "collective", "one_sided",
    "wrong_tag", "never_waits", "smuggles", "raises_on_one", "lingers", "leaves", "lies", "holds",
    "inside_a_computation", "one_buffer", "writes_too_early", "reads_too_early", "shifts_late", "uneven",
    "another_shape_for_one", "fail_together",
]  # fmt: skip


@pytest.fixture(scope="module")
def session():
    """Yield a session whose workers have loaded PROGRAMS."""
    with Session([PROGRAMS], NAMES, torch=True, seconds=60, total_seconds=600) as session:
        yield session


@pytest.fixture(autouse=True)
def forgiven(session) -> None:
    """Clear the record of the session before each test. The workers stay, because torch starts slowly."""
    session.losses, session.overdue, session.condemned, session.seconds = 0, 0, "", 60


@pytest.fixture
def patient(monkeypatch) -> None:
    """Let the judge wait a minute for aborted ranks, so that it kills no rank because the machine stalls."""
    monkeypatch.setattr(network, "ABORT_S", 60.0)


def here(name: str):
    namespace: dict = {}
    exec(PROGRAMS, namespace)
    return namespace[name]


def shards(P: int, *shape: int):
    generator = torch.Generator().manual_seed(P)
    return [torch.randn(*shape, generator=generator) for _ in range(P)]


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b


@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize(("name", "count"), [("ring_sum", 1), ("overlapped", 2), ("collective", 1)])
def test_the_outcome_equals_the_virtual_clusters(session, name, count, P) -> None:
    arguments = [shards(P, 1, 2, 5, 4) for _ in range(count)]
    judged = SandboxedSubject(session, name).run_ring(P, *arguments)
    function = here(name)
    virtual = VirtualCluster(P).run(lambda ring: function(ring, *(a[ring.rank].clone() for a in arguments)))
    assert all(same(a, b) for a, b in zip(judged.results, virtual.results, strict=True))
    for rank in range(P):
        for control in (False, True):
            ours, theirs = (o.trace.exchanges(rank, control=control) for o in (judged, virtual))
            facts = [(e.index, e.tag, e.to, e.source, e.bytes_sent, e.bytes_received, e.shapes) for e in ours]
            assert sorted(facts) == sorted(
                (e.index, e.tag, e.to, e.source, e.bytes_sent, e.bytes_received, e.shapes) for e in theirs
            )
        assert judged.trace.rounds(rank) == virtual.trace.rounds(rank)
        assert judged.trace.bytes_sent(rank) == virtual.trace.bytes_sent(rank)
        assert judged.trace.peers(rank) == virtual.trace.peers(rank)
    assert all(e.posted <= e.waited <= e.done for e in judged.trace.exchanges())


@pytest.mark.parametrize("P", [5])
@pytest.mark.parametrize("name", ["overlapped", "shifts_late", "uneven"])
def test_the_virtual_clock_is_the_virtual_clusters(session, name, P) -> None:
    """The judge and the virtual cluster record equal events and times on every rank, whatever the real speed."""
    arguments = [shards(P, 1, 2, 5, 4) for _ in range(2)]
    judged = SandboxedSubject(session, name).run_ring(P, *arguments)
    function = here(name)
    virtual = VirtualCluster(P).run(lambda ring: function(ring, *(a[ring.rank].clone() for a in arguments)))
    for rank in range(P):
        ours, theirs = ([e for e in o.trace.events if e.rank == rank] for o in (judged, virtual))
        assert ours == theirs
    if P > 1:
        assert judged.trace.exposed() == (
            P * (P - 1) / 2 if name == "shifts_late" else virtual.trace.exposed()
        )
    assert name != "overlapped" or judged.trace.exposed() == 0


def test_a_buffer_in_flight_holds_nothing_that_could_be_computed_with(session) -> None:
    data = shards(2, 4)
    early, late = SandboxedSubject(session, "reads_too_early").run_ring(2, data).results[0]
    assert torch.isnan(early).all() and torch.equal(late, data[1])


def test_data_under_a_control_tag_is_counted(session) -> None:
    outcome = SandboxedSubject(session, "smuggles").run_ring(2, shards(2, 64, 64))
    assert outcome.trace.rounds(0) == 1 and outcome.trace.bytes_sent(0) == 64 * 64 * 4


BROKEN = {
    "one_sided": (3, "DeadlockError", "they wait for a rank that has finished"),
    "wrong_tag": (2, "MismatchError", "'rank 1'"),
    "never_waits": (2, "UnreceivedError", "rank 0 never waited for exchange 0"),
    "raises_on_one": (3, "KeyError", "rank 1: in raises_on_one"),
    "inside_a_computation": (2, "CommError", "not inside it"),
    "one_buffer": (2, "CommError", "also sent"),
    "writes_too_early": (2, "CommError", "written while it was sent"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_ring_is_named_and_the_workers_go_on(session, patient, name) -> None:
    P, kind, text = BROKEN[name]
    workers = list(session.workers(3))
    with pytest.raises(Crashed) as failure:
        SandboxedSubject(session, name).run_ring(P, shards(P, 4, 3))
    assert kind in failure.value.message and text in failure.value.counterexample
    data = shards(3, 4, 3)
    assert torch.allclose(SandboxedSubject(session, "ring_sum").run_ring(3, data).results[1], sum(data))
    assert session.workers(3) == workers, "no worker had to be started again"


@pytest.mark.parametrize(("computations", "reported"), [([0, 0, 0], 0), ([1, 0, 0], 1), ([0, 2, 1], 0)])
@pytest.mark.parametrize("slow", [0, 1])
def test_the_rank_that_failed_first_on_the_virtual_clock_is_reported(
    session, patient, slow, computations, reported
) -> None:
    """The report is the virtual cluster's, whichever worker was faster."""
    x, seconds = shards(3, 4, 3), [0.3 * (rank == slow) for rank in range(3)]
    with pytest.raises(Crashed, match="KeyError") as failure:
        SandboxedSubject(session, "fail_together").run_ring(3, x, seconds, computations)
    assert f"mine {reported}" in failure.value.counterexample
    program: dict = {}
    exec(PROGRAMS, program)
    with pytest.raises(RankFailedError, match=f"rank {reported} raised KeyError"):
        VirtualCluster(3).run(
            lambda ring: program["fail_together"](ring, x[ring.rank], 0.0, computations[ring.rank])
        )


@pytest.mark.parametrize(
    ("name", "text"), [("lingers", "did not end within 1 s"), ("leaves", "ended its process")]
)
def test_a_lost_rank_ends_the_run_and_is_replaced(session, name, text) -> None:
    SandboxedSubject(session, "ring_sum").run_ring(2, shards(2, 4))
    session.seconds = 1 if name == "lingers" else 60
    with pytest.raises(Crashed, match=text):
        SandboxedSubject(session, name).run_ring(2, shards(2, 4))
    session.seconds = 60
    data = shards(2, 4)
    assert torch.allclose(SandboxedSubject(session, "ring_sum").run_ring(2, data).results[0], sum(data))


def test_a_rank_that_breaks_the_protocol_condemns_the_submission(session) -> None:
    with pytest.raises(Condemned):
        SandboxedSubject(session, "lies").run_ring(2, shards(2, 4))
    assert "interfered" in session.condemned
    with pytest.raises(Condemned):
        SandboxedSubject(session, "ring_sum").run_ring(2, shards(2, 4))


def test_the_peak_is_the_systems_and_begins_anew_with_each_run(session) -> None:
    subject = SandboxedSubject(session, "holds")
    for mib in (64, 16, 48):
        outcome = subject.run_ring(2, shards(2, 4), [mib, 1])
        assert outcome.results == [mib * 2.0**18, 2.0**18]
        assert mib - 2 <= outcome.memory[0].peak_bytes / 2**20 <= mib + 6  # counted per processor
        assert outcome.memory[1].peak_bytes / 2**20 <= 7


def test_a_ring_exercise_is_graded(tmp_path) -> None:
    from ringlab_course.judge.judge import grade

    assert grade(notebook(tmp_path, RIGHT_RING, grade="90.ring"), RING_EXERCISE, timeout=60).ok
    gathering = "def ring_sum(ring, x):\n    return sum(ring.all_gather(x))"
    report = grade(notebook(tmp_path, gathering, grade="90.ring"), RING_EXERCISE, timeout=60)
    assert [check.ok for check in report.stages[0].checks] == [True, True, False]
    assert report.stages[0].checks[2].message == "Send to the next rank only."


def test_ranks_that_are_broken_off_take_the_next_call(session, patient) -> None:
    """Workers survive a run that is broken off, even if they have posted exchanges that no rank answered."""
    before = [worker.pid for worker in session.workers(4)]
    shapes = [torch.zeros(8), torch.zeros(8), torch.zeros(4), torch.zeros(8)]
    with pytest.raises(Crashed, match="MismatchError"):
        SandboxedSubject(session, "another_shape_for_one").run_ring(4, shapes)
    assert [worker.pid for worker in session.workers(4)] == before
