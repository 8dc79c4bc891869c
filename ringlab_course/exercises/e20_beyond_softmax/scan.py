"""Checks of 20.scan: the state that enters each rank, by few messages in few rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_array
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("20.scan")

BOUND = 1e-9
HOP = 0.5
"""Seconds of a message on the virtual clock."""


@dataclass(frozen=True)
class Problem:
    """What the tokens of every rank do to a state: S' = A S + B."""

    As: list[torch.Tensor]
    Bs: list[torch.Tensor]

    @property
    def text(self) -> str:
        return f"P={len(self.As)}"

    def after(self, ranks: Sequence[int]) -> np.ndarray:
        """Return the state after these ranks, in this order, from zeros."""
        state = np.zeros(self.Bs[0].shape)
        for rank in ranks:
            state = self.As[rank].numpy() @ state + self.Bs[rank].numpy()
        return state


def problem(rng: np.random.Generator, P: int, H: int = 1, D: int = 3, Dv: int = 2) -> Problem:
    """Return random transitions, near a rotation, so that no rank is forgotten."""
    As = [np.linalg.qr(rng.standard_normal((H, D, D)))[0] * rng.uniform(0.7, 1.0) for _ in range(P)]
    Bs = [rng.standard_normal((H, D, Dv)) for _ in range(P)]
    return Problem([torch.from_numpy(x) for x in As], [torch.from_numpy(x) for x in Bs])


Enter = Callable[[int, Problem], np.ndarray]
Pair = tuple[np.ndarray, np.ndarray]
"""(A, B) of a transition."""


def _sum(rank: int, given: Problem) -> np.ndarray:
    return sum((given.Bs[r].numpy() for r in range(rank)), np.zeros(given.Bs[0].shape))


def _of(ranks: Callable[[int, int], Sequence[int]]) -> Enter:
    return lambda rank, given: given.after(ranks(rank, len(given.As)))


def rounds_of(P: int) -> int:
    """Return the rounds of a doubling scan: the logarithm of P to the base 2, rounded up."""
    return (P - 1).bit_length()


def _heard(rank: int, P: int) -> Sequence[int]:
    """The ranks before, as far as ⌊log₂ P⌋ rounds of doubling reach."""
    return range(max(0, rank + 1 - (1 << (P.bit_length() - 1))), rank)


def _swapped(rank: int, given: Problem) -> np.ndarray:
    """The state that enters, if what came before is composed in the wrong order, and what is sent in the right one."""
    P, whole = len(given.As), _pairs(given)
    before: dict[int, Pair] = {}
    for distance in (1 << power for power in range(rounds_of(P))):
        arrived = {r: whole[r - distance] for r in range(distance, P)}
        before |= {r: then(before[r], each) if r in before else each for r, each in arrived.items()}
        whole |= {r: then(each, whole[r]) for r, each in arrived.items()}
    return before[rank][1] if rank in before else np.zeros(given.Bs[0].shape)


def _with_the_new_a(rank: int, given: Problem) -> np.ndarray:
    """The state that enters, if what is sent on puts A together first, and B with the A that it has become."""
    P, whole = len(given.As), _pairs(given)
    before: dict[int, Pair] = {}
    for distance in (1 << power for power in range(rounds_of(P))):
        arrived = {r: whole[r - distance] for r in range(distance, P)}
        before |= {r: then(each, before[r]) if r in before else each for r, each in arrived.items()}
        for r, (A, B) in arrived.items():
            new = whole[r][0] @ A
            whole[r] = new, new @ B + whole[r][1]
    return before[rank][1] if rank in before else np.zeros(given.Bs[0].shape)


def _pairs(given: Problem) -> dict[int, Pair]:
    return {r: (A.numpy(), B.numpy()) for r, (A, B) in enumerate(zip(given.As, given.Bs, strict=True))}


def then(first: Pair, second: Pair) -> Pair:
    """Return the composition of two transitions: the first, then the second."""
    return second[0] @ first[0], second[0] @ first[1] + second[1]


truth = _of(lambda rank, P: range(rank))
MISTAKES = (
    mistake("counts_its_own_tokens", _of(lambda rank, P: range(rank + 1))),
    mistake("in_reverse_order", _of(lambda rank, P: range(rank)[::-1])),
    mistake("swaps_what_enters", _swapped),
    mistake("composes_with_the_new_a", _with_the_new_a),
    mistake("rounds_down", _of(_heard)),
    mistake("the_rank_before_alone", _of(lambda rank, P: range(max(rank - 1, 0), rank))),
    mistake("adds_contributions", _sum),
    mistake("goes_around", _of(lambda rank, P: [(rank + step) % P for step in range(1, P)])),
    mistake("powers_of_two_alone"),
    mistake("relays"),
    mistake("one_round_too_many"),
    mistake("gathers_all_transitions"),
)
NAMED = {each.name: each for each in MISTAKES}


def _run(subject: Any, given: Problem) -> Any:
    P = len(given.As)
    try:
        return subject.run_ring(P, given.As, given.Bs)
    except Crashed as crash:
        stuck = any(each in crash.message for each in ("Deadlock", "Unreceived", "PeerDied", "Mismatch"))
        if stuck and P & (P - 1):
            raise NAMED["powers_of_two_alone"].failure(f"{given.text}\n{crash.counterexample}") from None
        raise


def _answers(results: Sequence[Any], given: Problem) -> Iterator[Answered]:
    for rank, answer in enumerate(results):
        right = truth(rank, given)
        got = expect_array(answer, right.shape, name="the state")
        yield Answered((got,), (right,), BOUND, (rank, given), ("the state",), f"{given.text}: rank {rank}")


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    cases = [problem(rng, P) for P in (1, 2, 4, 8)]
    compare_all((each for case in cases for each in _answers(_run(subject, case).results, case)), MISTAKES)


def _check_any(subject: Any, rng: np.random.Generator) -> None:
    """Numbers of ranks that are no power of two; and a rank whose tokens forget everything."""
    cases = [problem(rng, P, H=2) for P in (3, 5, 6, 7)]
    cases[-1].As[int(rng.integers(1, 4))].zero_()
    compare_all((each for case in cases for each in _answers(_run(subject, case).results, case)), MISTAKES)


def _right(subject: Any, given: Problem) -> Any:
    """The trace of a run whose values are right: only of such a run are messages counted."""
    outcome = _run(subject, given)
    compare_all(_answers(outcome.results, given), MISTAKES)
    return outcome.trace


def _check_rounds(subject: Any, rng: np.random.Generator) -> None:
    """On the virtual clock a message takes ½ s: as many rounds as doublings."""
    for P in (8, 7, 4):
        given = problem(rng, P)
        trace = _right(subject, given)
        if not trace.exchanges():
            raise Failure("No rank can know the others' tokens without a message.", given.text)
        end, enough = max(each.done for each in trace.exchanges()), HOP * rounds_of(P)
        if end > enough + 1e-9:
            text = f"{given.text}: the last message arrives after {end:g} s, {enough:g} s are enough"
            name = "one_round_too_many" if end <= enough + HOP + 1e-9 and P > 4 else "relays"
            raise NAMED[name].failure(text)


def _check_bytes(subject: Any, rng: np.random.Generator) -> None:
    """At most one (A, B) in each round."""
    for P in (8, 4):  # of 4 ranks, one round too many sends as often as an all-gather
        given = problem(rng, P, D=4)
        trace, one = _right(subject, given), given.As[0].nbytes + given.Bs[0].nbytes
        for rank in range(P):
            if (sent := trace.bytes_sent(rank)) > rounds_of(P) * one:
                text = (
                    f"{given.text}: rank {rank} sent {sent:,} bytes, {rounds_of(P)} times {one:,} are enough"
                )
                everybody = sent >= (P - 1) * one
                raise NAMED["gathers_all_transitions" if everybody else "one_round_too_many"].failure(text)


STAGE = Stage(
    id="20.scan",
    function="enter",
    title="The scan over ranks",
    kind="ring",
    hints=(
        "If rank r knows what the tokens of ranks r − 1 and r do to a state together, and rank r − 2 knows the same of ranks r − 3 "
        "and r − 2: how many messages are missing until rank r knows it of four ranks?",
        "Keep what the ranks from r − n + 1 to r do together, beginning with n = 1. In each round send it to rank r + n, receive "
        "that of rank r − n, put yours after it, and double n. Ranks without a partner on one side send or receive only. What "
        "came before your own tokens is wanted: keep a second sum, without them.",
        r"$(A_2, B_2) \circ (A_1, B_1) = (A_2 A_1,\; A_2 B_1 + B_2)$, associative, not commutative; "
        r"after round $i$ rank $r$ has ranks $r - 2^i + 1 \dots r$",
    ),
    misconceptions=MISTAKES,
    checks=(
        Check("values", 2, "visible", "the state that enters every rank, P = 1, 2, 4, 8", _check_values),
        Check("any", 1, "visible", "three ranks, five, six, seven", _check_any),
        Check("rounds", 2, "visible", "as many rounds as doublings", _check_rounds, kind="cost"),
        Check("bytes", 1, "held-out", "one (A, B) in each round", _check_bytes, kind="cost"),
    ),
)  # fmt: skip
