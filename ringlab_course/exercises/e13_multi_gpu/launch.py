"""Checks of 13.launch: faults in how ranks were started, and the ring's hops between machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered
from ringlab_course.checking.exact import compare_exactly, expect_integer
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import misconceptions_of

Process = dict[str, Any]
Answer = tuple[list[str], int]
PROBLEMS = ("device", "rank", "rendezvous", "world size")
LOCAL = ("localhost", "127.0.0.1")


def started(nodes: int, each: int, *, cyclic: bool = False, master: str = "node0") -> list[Process]:
    """Return the environment of each process.

    With `cyclic`, neighbours in the ring are on different machines.
    """
    world = nodes * each
    found = []
    for rank in range(world):
        node, local = (rank % nodes, rank // nodes) if cyclic else divmod(rank, each)
        found.append(
            {
                "RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_RANK": local,
                "MASTER_ADDR": master,
                "MASTER_PORT": 29500,
                "host": f"node{node}",
            }
        )
    return found


def problems(processes: Sequence[Process]) -> set[str]:
    """Return the names in PROBLEMS that apply to these processes."""
    found = set()
    if sorted(p["RANK"] for p in processes) != list(range(len(processes))):
        found.add("rank")
    if {p["WORLD_SIZE"] for p in processes} != {len(processes)}:
        found.add("world size")
    hosts = {p["host"] for p in processes}
    addresses = {(p["MASTER_ADDR"], p["MASTER_PORT"]) for p in processes}
    if len(addresses) > 1 or (len(hosts) > 1 and any(address in LOCAL for address, _ in addresses)):
        found.add("rendezvous")
    if len({(p["host"], p["LOCAL_RANK"]) for p in processes}) < len(processes):
        found.add("device")
    return found


def crossings(processes: Sequence[Process]) -> int:
    """Return how many hops of the ring go to another machine."""
    ordered = [p["host"] for p in sorted(processes, key=lambda p: p["RANK"])]
    return sum(host != ordered[place - 1] for place, host in enumerate(ordered))


def truth(processes: Sequence[Process]) -> Answer:
    """Return (problems by name, hops between machines), the right answer of this stage.

    If ranks are wrong, the number of hops is 0.
    """
    found = problems(processes)
    return sorted(found), 0 if "rank" in found else crossings(processes)


NAMES = ("problems", "crossings")


def _read(answer: Any) -> Answer:
    names, hops = expect_tuple(answer, NAMES)
    if not isinstance(names, (list, tuple, set)) or not all(isinstance(name, str) for name in names):
        raise Failure("The problems should be a list of names.", f"got a {type(names).__name__}")
    if strange := [name for name in names if name not in PROBLEMS]:
        raise Failure(f"The problems should be among {', '.join(PROBLEMS)}.", f"got {strange[0][:40]!r}")
    return sorted(set(names)), expect_integer(hops, "The number of hops")


def _compare(subject: Any, rng: np.random.Generator, cases: Iterable[tuple[list[Process], str]]) -> None:
    """Compare the learner's answers with the right ones. Each launch gets a random MASTER_PORT."""

    def asked() -> Iterator[Answered]:
        for listed, text in cases:
            shift = int(rng.integers(20_000))
            processes = [{**p, "MASTER_PORT": p["MASTER_PORT"] + shift} for p in listed]
            yield Answered(_read(subject.call(processes)), truth(processes), names=NAMES, text=text)

    compare_exactly(asked(), _read)


def changed(processes: list[Process], **changes: Any) -> list[Process]:
    """Return the processes, with these values changed in the last process."""
    return [*processes[:-1], {**processes[-1], **changes}]


def _check_hops(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on sound launches.

    Processes are placed machine by machine, dealt in turn, on one machine, or listed in any order.
    """
    launches = [
        (started(1, 1), "one process"),
        (started(1, 4), "one machine with 4 processes"),
        (started(2, 4), "2 machines with 4 each"),
        (started(2, 4, cyclic=True), "2 machines with 4 each, dealt in turn"),
        (started(3, 2, cyclic=True), "3 machines with 2 each, dealt in turn"),
    ]
    shuffled = [started(4, 2)[place] for place in (4, 0, 6, 2, 1, 7, 3, 5)]
    _compare(subject, rng, [*launches, (shuffled, "4 machines with 2 each, listed in another order")])


def _check_problems(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on launches with one problem that is easy to see, and one launch with two problems."""
    sound = started(2, 2)
    _compare(subject, rng, [
        (sound, "2 machines with 2 each"),
        (started(1, 3, master="localhost"), "one machine, with localhost: no problem"),
        (changed(sound, RANK=2), "two processes are rank 2"),
        (changed(sound, WORLD_SIZE=8), "one process has another WORLD_SIZE"),
        (changed(sound, MASTER_ADDR="node1"), "one process has another MASTER_ADDR"),
        (changed(sound, LOCAL_RANK=0), "two processes of a machine have LOCAL_RANK 0"),
        (changed(sound, RANK=1, LOCAL_RANK=0), "a rank is there twice, and a device is taken twice"),
    ])  # fmt: skip


def _check_quiet(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on launches with a problem that is easy to overlook, and on one sound launch."""
    fewer = started(2, 2)[:3]
    _compare(subject, rng, [
        (fewer, "3 of 4 processes came"),
        ([{**p, "WORLD_SIZE": 3} for p in changed(fewer, RANK=3)], "ranks 0, 1 and 3"),
        (started(2, 2, master="localhost"), "2 machines, all with localhost"),
        (started(2, 2, master="127.0.0.1"), "2 machines, all with 127.0.0.1"),
        (started(1, 2, master="localhost"), "one machine, with localhost"),
        (changed(started(2, 2), MASTER_PORT=29501), "one process has another MASTER_PORT"),
    ])  # fmt: skip


STAGE = Stage(
    id="13.launch",
    function="preflight",
    title="Before the first hop",
    hints=(
        "A process must know four things before it sends: who am I, how many are we, where do we meet, which device is mine. "
        "Which of them must be equal on all processes, and which must differ?",
        "With n processes: the RANKs are 0 … n − 1, and each WORLD_SIZE is n. There is one pair of address and port, and it is "
        "not localhost if there are several machines. All pairs (host, LOCAL_RANK) differ. Then sort by RANK and go around once.",
        r"$\text{crossings} = \#\{\,r : \mathrm{host}(r) \ne \mathrm{host}((r + 1) \bmod n)\,\}$",
    ),
    misconceptions=misconceptions_of("13.launch"),
    checks=(
        Check("hops", 1, "visible", "sound launches: hops that leave a machine", _check_hops),
        Check("problems", 1, "visible", "one problem at a time, and two together", _check_problems),
        Check("quiet", 1, "stress", "problems that all processes share", _check_quiet),
    ),
)  # fmt: skip
