"""Injected faults of the network act alike in notebook and judge, and do not disturb a program that keeps
the rules.

An honest mistake in a program is reported with an explanation, and never counts as an attack.
"""

from __future__ import annotations

import pytest
import torch

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Crashed, Failure, NotWritten
from ringlab_course.checking.faults import Ended, Faults
from ringlab_course.checking.in_process import InProcessSubject
from ringlab_course.judge import network
from ringlab_course.judge.session import SandboxedSubject, Session
from tests.course.judge.small_contract import HINTS, RIGHT_RING

pytestmark = pytest.mark.needs_bwrap

PROGRAMS = (
    RIGHT_RING
    + """
import torch
def overlapped(ring, x):
    total, times = x.clone(), [ring.comm.now()]
    for step in range(ring.world_size - 1):
        work = ring.post(x)
        total = ring.compute("add", torch.add, total, x.sin())
        (x,) = work.wait()
        times.append(ring.comm.now())
    return total + x, times
def two_under_way(ring, x):
    first, second = ring.post(x), ring.post(-x)
    mine = ring.compute("sine", torch.sin, x)
    return mine + first.wait()[0] - second.wait()[0]
def collective(ring, x):
    ring.barrier()
    return torch.cat(ring.all_gather(x)), ring.all_reduce(x, "max")
def swallows(ring, x):
    total = x.clone()
    for step in range(ring.world_size - 1):
        try:
            x = ring.shift(x)
        except Exception:
            break
        total += x
    return total
def says_it_in_its_own_words(ring, x):
    try:
        return ring.shift(x)
    except Exception as error:
        raise ValueError("a neighbour is gone") from error
def waits_in_a_circle(ring, x):
    buffer = torch.empty_like(x)
    ring.comm.exchange(receive=(buffer,), source=ring.previous, tag="cycle: 5 → 6 → 5").wait()
    ring.comm.exchange(send=(x,), to=ring.next, tag="cycle: 5 → 6 → 5").wait()
    return buffer
def one_leaves(ring, x):
    return ring.shift(x, tag="\\ncycle: 5 → 6 → 5") if ring.rank else x
def unwritten_at_the_end(ring, x):
    if ring.rank == 1:
        return ring.shift(x)
    raise NotImplementedError
def shifts_in_threads(ring, x):
    from threading import Thread
    threads = [Thread(target=ring.shift, args=(x,)) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return x
def shifts_while_it_computes(ring, x):
    from threading import Thread
    thread = Thread(target=ring.shift, args=(x,))
    def work():
        thread.start()
        thread.join()
        return x + x
    return ring.compute("both", work)
KEPT = []
def keeps_its_ring(ring, x):
    KEPT.append(ring)
    return KEPT[0].shift(x)
def sends_eight_bits(ring, x):
    return ring.shift(x.to(torch.float8_e4m3fn)).to(x.dtype)
def computes(ring, x):
    return ring.compute("block", lambda: sum((x @ x).sum() for _ in range(20)))
def says_that_it_computes(ring, x):
    ring.compute("block", int)
    return sum((x @ x).sum() for _ in range(20))
def goes_on_in_a_thread(ring, x):
    from threading import Thread
    def spin():
        while True: pass
    if ring.rank == 1: Thread(target=spin, daemon=True).start()
    return x
"""
)
NAMES = [line.split("(")[0].removeprefix("def ") for line in PROGRAMS.splitlines() if line.startswith("def ")]
KEEPS_THE_RULES = {
    "ring_sum": lambda r: r,
    "overlapped": lambda r: r[0],
    "collective": lambda r: r,
    "two_under_way": lambda r: r,
}
BAD = [
    Faults(1, delay=3.0),
    Faults(2, slow=(1, 5.0)),
    Faults(3, late=1.0),
    Faults(4, delay=1.0, slow=(0, 2.0), late=0.5),
]


@pytest.fixture(scope="module")
def session():
    """Yield a session whose workers have loaded PROGRAMS."""
    with Session([PROGRAMS], NAMES, torch=True, seconds=60, total_seconds=600) as session:
        yield session


@pytest.fixture(autouse=True)
def forgiven(session) -> None:
    session.losses, session.overdue, session.condemned = 0, 0, ""


def subjects(session, name):
    space: dict = {}
    exec(PROGRAMS, space)
    check = Check("c", 1, "visible", "t", print)
    stage = Stage("90.x", name, "t", (check,), HINTS, kind="ring")
    return SandboxedSubject(session, name), InProcessSubject(stage, space)


def shards(P: int):
    generator = torch.Generator().manual_seed(P)
    return [torch.rand(2, 3, generator=generator) + 1 for _ in range(P)]


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b


@pytest.mark.parametrize("faults", BAD, ids=lambda f: f"seed{f.seed}")
@pytest.mark.parametrize("name", KEEPS_THE_RULES)
def test_a_program_that_keeps_the_rules_answers_the_same_bits_on_any_network(session, name, faults) -> None:
    values = KEEPS_THE_RULES[name]
    for subject in subjects(session, name):
        for P in (2, 3):
            usual = subject.run_ring(P, shards(P)).results
            assert same(
                [*map(values, usual)], [*map(values, subject.run_ring(P, shards(P), faults=faults).results)]
            )


@pytest.mark.parametrize("kill", [(0, 0), (1, 1)])
@pytest.mark.parametrize("name", ["ring_sum", "collective"])
def test_when_a_rank_dies_the_others_get_the_error_of_a_real_run(session, name, kill) -> None:
    for subject in subjects(session, name):
        results = subject.run_ring(3, shards(3), faults=Faults(kill=kill)).results
        assert results[kill[0]] == Ended("Killed")
        for rank in {0, 1, 2} - {kill[0]}:
            assert isinstance(results[rank], Ended) and results[rank].error == "PeerDiedError", results[rank]
            assert (
                f"rank {kill[0]} " in results[rank].text and f"rank {rank} only waited" in results[rank].text
            )


def test_a_rank_that_goes_on_without_the_dead_returns_what_it_has(session) -> None:
    for subject in subjects(session, "swallows"):
        results = subject.run_ring(3, shards(3), faults=Faults(kill=(1, 0))).results
        assert results[1] == Ended("Killed")
        for rank in (0, 2):
            assert torch.is_tensor(results[rank]) and not torch.allclose(results[rank], sum(shards(3)))


def test_the_learners_own_error_is_an_end_too_and_a_skeleton_stays_unwritten(session) -> None:
    for subject in subjects(session, "says_it_in_its_own_words"):
        results = subject.run_ring(2, shards(2), faults=Faults(kill=(1, 0))).results
        assert results[0].error == "ValueError" and "a neighbour is gone" in results[0].text
    for subject in subjects(session, "unwritten_at_the_end"):
        with pytest.raises(NotWritten):
            subject.run_ring(2, shards(2), faults=Faults(kill=(1, 0)))


def test_workers_are_not_lost_with_a_killed_rank(session, monkeypatch) -> None:
    monkeypatch.setattr(network, "ABORT_S", 60.0)  # seconds, because a busy machine may stall
    sandboxed, _ = subjects(session, "ring_sum")
    before = [*session.workers(3)]
    for exchange in (0, 1):
        sandboxed.run_ring(3, shards(3), faults=Faults(kill=(2, exchange)))
    assert same(sandboxed.run_ring(3, shards(3)).results[2], sum(shards(3)))
    assert session.workers(3) == before and session.losses == 0


@pytest.mark.parametrize(
    "faults",
    [
        None,
    ],
)
def test_a_deadlock_is_told_rank_by_rank_and_no_tag_can_draw_it(session, faults) -> None:
    for subject in subjects(session, "waits_in_a_circle"):
        with pytest.raises(Crashed) as failure:
            subject.run_ring(3, shards(3), faults=faults)
        circle = "rank 0 waits for rank 2, which waits for rank 1, which waits for rank 0."
        assert f"They wait for each other in a circle: {circle}" in failure.value.message
        assert "rank 1 waits: rank 1 expects" in failure.value.counterexample
    for subject in subjects(session, "one_leaves"):
        with pytest.raises(Crashed) as failure:
            subject.run_ring(3, shards(3), faults=faults)
        assert "waits for a rank that has ended already" in failure.value.message
        assert "circle" not in failure.value.message


def test_a_mismatch_is_raised_where_both_ranks_wait_and_can_be_caught(session) -> None:
    unequal = [torch.ones(2), torch.ones(3)]
    for subject in subjects(session, "ring_sum"):
        with pytest.raises(Crashed, match="MismatchError") as failure:
            subject.run_ring(2, unequal)
        assert "float32[2]" in failure.value.counterexample and "float32[3]" in failure.value.counterexample
    for subject in subjects(session, "swallows"):
        assert same(subject.run_ring(2, unequal).results, unequal)


HONEST_MISTAKES = {
    "shifts_in_threads": "a call from the thread",
    "shifts_while_it_computes": "a call from the thread",
    "keeps_its_ring": "a ring of an earlier run",
    "sends_eight_bits": "a tensor of float8_e4m3fn",
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", HONEST_MISTAKES)
def test_an_honest_mistake_is_told_in_words_and_condemns_nobody(session, name) -> None:
    judged, virtual = subjects(session, name)
    if name == "keeps_its_ring":
        judged.run_ring(2, shards(2))
        virtual.run_ring(1, shards(1))
    told = []
    for subject in (judged, virtual):
        with pytest.raises(Crashed) as failure:
            subject.run_ring(2, shards(2))
        assert HONEST_MISTAKES[name] in failure.value.counterexample
        told.append(failure.value.counterexample.rpartition("remedy: ")[2])
    assert told[0] == told[1] and not session.condemned
    SandboxedSubject(session, "ring_sum").run_ring(2, shards(2))


def test_computing_that_is_a_word_alone_is_not_believed(session) -> None:
    for name, events in (("computes", 1), ("says_that_it_computes", 0)):
        trace = SandboxedSubject(session, name).run_ring(1, [torch.ones(600, 600)]).trace
        assert len(trace.computes()) == events, name


def test_an_answer_is_none_while_a_thread_goes_on(session) -> None:
    with pytest.raises(Crashed, match="one of its threads is still computing"):
        SandboxedSubject(session, "goes_on_in_a_thread").run_ring(2, shards(2))
    assert not session.condemned


SPIN = """
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
def spin():
    while True: pass
"""
STARTED = "STARTED = Thread(target=spin, daemon=True)\nSTARTED.start()\ndef f(x): return STARTED and x"
IN_THE_CALL = "def f(x):\n    Thread(target=spin, daemon=True).start()\n    return x"
WAITING = "POOL = ThreadPoolExecutor(2)\nPOOL.submit(int)\ndef f(x): return POOL and x"


@pytest.mark.parametrize("source", [STARTED, IN_THE_CALL], ids=["while loading", "in the call"])
def test_a_function_of_one_process_is_held_to_the_same(source) -> None:
    with Session([SPIN + source], ["f"], torch=False, seconds=60) as session:
        with pytest.raises(Crashed, match="one of its threads is still computing"):
            SandboxedSubject(session, "f").call(1)
        assert not session.condemned


TAKES_THE_GRADIENT_AWAY = """
import sys
def f(ring, x):
    for name, module in list(sys.modules.items()):
        if name == "__main__" or name.endswith("judge.worker"):
            module.with_gradient = lambda program: lambda *a: None
    return x.sum()
"""


def test_an_answer_without_the_gradient_that_was_asked_for_is_interference() -> None:
    with Session([TAKES_THE_GRADIENT_AWAY], ["f"], torch=True) as session:
        subject = SandboxedSubject(session, "f")
        subject.run_ring(2, [torch.ones(2)] * 2, gradient=True)
        with pytest.raises(Failure, match="interfered"):
            subject.run_ring(2, [torch.ones(2)] * 2, gradient=True)
        assert "an answer and its gradient" in session.condemned
