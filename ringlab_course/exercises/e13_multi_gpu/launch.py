"""Checks of 13.launch: faults in how ranks were started, and the hops of the ring that leave a machine.

Answers of this exercise that are names or counts are compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ringlab_course.checking.contract import Check, Misconception, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import mistakes_of


@dataclass(frozen=True)
class Case:
    """One case: what the learner answered, what is right, the inputs of imitations, and the case in words."""

    answer: Any
    truth: Any
    inputs: Sequence[Any]
    text: str


def compare_exactly(
    cases: Iterable[Case], misconceptions: Sequence[Misconception], names: Sequence[str]
) -> None:
    """Return None when every answer is right; `names` are those of an answer's parts.

    Raises: the Failure of the first wrong one. It is named after a mistake only if that mistake gives the
    learner's answers in all cases, right ones too, and no other mistake does.
    """
    seen: list[Case] = []
    broken: Failure | None = None
    try:
        for case in cases:
            seen.append(case)
    except Failure as failure:  # what breaks off only leaves fewer cases to tell mistakes apart
        broken = failure
    first = next((case for case in seen if case.answer != case.truth), None)
    if first is None:
        if broken is not None:
            raise broken
        return
    example = f"{first.text}\ngot {first.answer!r}, expected {first.truth!r}"
    fitting = [m for m in misconceptions if all(_gives(m, case) for case in seen)]
    if len(fitting) == 1:
        raise fitting[0].failure(example)
    raise Failure(_verdict(first, names), example)


def _verdict(case: Case, names: Sequence[str]) -> str:
    """Return which parts of a wrong answer are wrong, and which are right."""
    right = {name: given == true for name, given, true in zip(names, case.answer, case.truth, strict=True)}
    wrong, held = ([name for name in names if right[name] is holds] for holds in (False, True))
    rest = f"; {' and '.join(held)} {'is' if len(held) == 1 else 'are'} right" if held else ""
    return f"{' and '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} wrong here{rest}."


def _gives(misconception: Misconception, case: Case) -> bool:
    if misconception.imitate is None:
        return False
    try:
        return bool(misconception.imitate(*case.inputs) == case.answer)
    except (ArithmeticError, ValueError, TypeError, IndexError):
        return False  # the mistake cannot be made on this input


def expect_pair(answer: Any, names: str, count: int) -> tuple[Any, ...]:
    """Return a tuple or list of `count` parts as a tuple. Raises: Failure for something else."""
    if answer is None:
        raise Failure("The result is None: is the `return` missing?")
    if not isinstance(answer, (tuple, list)) or len(answer) != count:
        raise Failure(f"The result should be {names}.", f"got a {type(answer).__name__}")
    return tuple(answer)


def expect_integer(value: Any, name: str) -> int:
    """Return a whole number as an int. Raises: Failure for something else."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int):
        raise Failure(f"{name} should be a whole number.", f"got {type(value).__name__}")
    return value


mistake = mistakes_of("13.launch")

Process = dict[str, Any]
Answer = tuple[list[str], int]
PROBLEMS = ("device", "rank", "rendezvous", "world size")
LOCAL = ("localhost", "127.0.0.1")


def started(nodes: int, each: int, *, cyclic: bool = False, master: str = "node0") -> list[Process]:
    """Return each process's environment; cyclic: neighbours in the ring are on different machines."""
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
    """Return which of PROBLEMS there are."""
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
    """Return (problems by name, hops between machines; 0 where ranks are wrong): the truth of this stage."""
    found = problems(processes)
    return sorted(found), 0 if "rank" in found else crossings(processes)


def _hops(count: Callable[[Sequence[Process]], int]) -> Callable[[Sequence[Process]], Answer]:
    def imitate(processes: Sequence[Process]) -> Answer:
        found, _ = truth(processes)
        return found, 0 if "rank" in found else count(processes)

    return imitate


def _open_ended(processes: Sequence[Process]) -> int:
    ordered = [p["host"] for p in sorted(processes, key=lambda p: p["RANK"])]
    return sum(a != b for a, b in pairwise(ordered))


def _listed(processes: Sequence[Process]) -> int:
    return sum(p["host"] != processes[place - 1]["host"] for place, p in enumerate(processes))


def _without(name: str, holds: Callable[[Sequence[Process]], bool]) -> Callable[[Sequence[Process]], Answer]:
    """Imitate a search that finds the problem `name` only if `holds` is true."""

    def imitate(processes: Sequence[Process]) -> Answer:
        found = problems(processes) - {name} | ({name} if holds(processes) else set())
        return sorted(found), 0 if "rank" in found else crossings(processes)

    return imitate


def _differ(*names: str) -> Callable[[Sequence[Process]], bool]:
    return lambda processes: len({tuple(p[name] for name in names) for p in processes}) > 1


def _twice(*names: str) -> Callable[[Sequence[Process]], bool]:
    return lambda processes: len({tuple(p[name] for name in names) for p in processes}) < len(processes)


def _first_only(processes: Sequence[Process]) -> Answer:
    found, hops = truth(processes)
    return found[:1], hops


MISTAKES = (
    mistake("forgets_the_last_hop", _hops(_open_ended)),
    mistake("order_of_the_list", _hops(_listed)),
    mistake("counts_machines", _hops(lambda processes: len({p["host"] for p in processes}))),
    mistake("local_rank_everywhere", _without("device", _twice("LOCAL_RANK"))),
    mistake("only_doubles", _without("rank", _twice("RANK"))),
    mistake("agreement_is_enough", _without("world size", _differ("WORLD_SIZE"))),
    mistake("localhost_is_everywhere", _without("rendezvous", _differ("MASTER_ADDR", "MASTER_PORT"))),
    mistake("localhost_is_never_fine", _without("rendezvous", lambda ps: _differ("MASTER_ADDR", "MASTER_PORT")(ps) or any(
            p["MASTER_ADDR"] in LOCAL for p in ps))),
    mistake("ignores_the_port", _without("rendezvous", lambda ps: _differ("MASTER_ADDR")(ps) or "rendezvous" in problems(
            [{**p, "MASTER_PORT": 0} for p in ps]))),
    mistake("nothing_at_any_problem", lambda processes: (truth(processes)[0], 0 if truth(processes)[0] else truth(processes)[1])),
    mistake("first_problem_only", _first_only),
)  # fmt: skip


def _read(answer: Any) -> Answer:
    names, hops = expect_pair(answer, "a tuple (problems, crossings)", 2)
    if not isinstance(names, (list, tuple, set)) or not all(isinstance(name, str) for name in names):
        raise Failure("The problems should be a list of names.", f"got a {type(names).__name__}")
    if strange := [name for name in names if name not in PROBLEMS]:
        raise Failure(f"The problems should be among {', '.join(PROBLEMS)}.", f"got {strange[0][:40]!r}")
    return sorted(set(names)), expect_integer(hops, "The number of hops")


def _compare(subject: Any, rng: np.random.Generator, cases: Iterable[tuple[list[Process], str]]) -> None:
    """Compare on all cases, each with a meeting place of its own: the port is drawn."""

    def asked() -> Iterator[Case]:
        for listed, text in cases:
            shift = int(rng.integers(20_000))
            processes = [{**p, "MASTER_PORT": p["MASTER_PORT"] + shift} for p in listed]
            yield Case(_read(subject.call(processes)), truth(processes), (processes,), text)

    compare_exactly(asked(), MISTAKES, ("problems", "crossings"))


def changed(processes: list[Process], **changes: Any) -> list[Process]:
    """Return the processes with the last one's values changed."""
    return [*processes[:-1], {**processes[-1], **changes}]


def _check_hops(subject: Any, rng: np.random.Generator) -> None:
    """Sound launches: machine by machine, dealt in turn, on one machine, listed in any order."""
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
    """One problem at a time, each easy to see, and two together."""
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
    """Problems on which all agree, or that no comparison of two processes shows."""
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
    misconceptions=MISTAKES,
    checks=(
        Check("hops", 1, "visible", "sound launches: hops that leave a machine", _check_hops),
        Check("problems", 1, "visible", "one problem at a time, and two together", _check_problems),
        Check("quiet", 1, "stress", "problems that all processes share", _check_quiet),
    ),
)  # fmt: skip
