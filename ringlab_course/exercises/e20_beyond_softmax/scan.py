"""Checks of 20.scan: the state before each rank's tokens, computed with few messages in few rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_array
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.wrong_answers import misconceptions_of

BOUND = 1e-9
HOP = 0.5
"""The duration of a message on the virtual clock, in seconds."""


@dataclass(frozen=True)
class Problem:
    """The transition S' = A S + B that each rank's tokens make."""

    As: list[torch.Tensor]
    Bs: list[torch.Tensor]

    @property
    def text(self) -> str:
        return f"P={len(self.As)}"

    def entering(self, rank: int) -> np.ndarray:
        """Return the state that enters a rank: zeros, changed by the tokens of all earlier ranks."""
        state = np.zeros(self.Bs[0].shape)
        for A, B in zip(self.As[:rank], self.Bs[:rank], strict=True):
            state = A.numpy() @ state + B.numpy()
        return state


def problem(rng: np.random.Generator, P: int, H: int = 1, D: int = 3, Dv: int = 2) -> Problem:
    """Return random transitions that are near rotations, so that no rank is forgotten."""
    As = [np.linalg.qr(rng.standard_normal((H, D, D)))[0] * rng.uniform(0.7, 1.0) for _ in range(P)]
    Bs = [rng.standard_normal((H, D, Dv)) for _ in range(P)]
    return Problem([torch.from_numpy(x) for x in As], [torch.from_numpy(x) for x in Bs])


def rounds_of(P: int) -> int:
    """Return the number of rounds of a doubling scan: the logarithm of P to the base 2, rounded up."""
    return (P - 1).bit_length()


def _run(subject: Any, given: Problem) -> Any:
    P = len(given.As)
    try:
        return subject.run_ring(P, given.As, given.Bs)
    except Crashed as crash:
        stuck = any(each in crash.message for each in ("Deadlock", "Unreceived", "PeerDied", "Mismatch"))
        if stuck and P & (P - 1):
            raise STAGE.misconception("powers_of_two_alone").failure(
                f"{given.text}\n{crash.counterexample}"
            ) from None
        raise


def _answers(results: Sequence[Any], given: Problem) -> Iterator[Answered]:
    for rank, answer in enumerate(results):
        right = given.entering(rank)
        got = expect_array(answer, right.shape, name="the state")
        text = f"{given.text}: rank {rank}"
        yield Answered((got,), (right,), BOUND, names=("the state",), text=text)


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    cases = [problem(rng, P) for P in (1, 2, 4, 8)]
    compare_all(each for case in cases for each in _answers(_run(subject, case).results, case))


def _check_any(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on numbers of ranks that are no power of two.

    In one case, the tokens of a rank forget everything.
    """
    cases = [problem(rng, P, H=2) for P in (3, 5, 6, 7)]
    cases[-1].As[int(rng.integers(1, 4))].zero_()
    compare_all(each for case in cases for each in _answers(_run(subject, case).results, case))


def _right(subject: Any, given: Problem) -> Any:
    """Return the trace of a run after comparing its values. Messages count only if values are right."""
    outcome = _run(subject, given)
    compare_all(_answers(outcome.results, given))
    return outcome.trace


def _check_rounds(subject: Any, rng: np.random.Generator) -> None:
    """Check that there are as many rounds as doublings. On the virtual clock, a message takes ½ s."""
    for P in (8, 7, 4):
        given = problem(rng, P)
        trace = _right(subject, given)
        if not trace.exchanges():
            raise Failure("No rank can know the others' tokens without a message.", given.text)
        end, enough = max(each.done for each in trace.exchanges()), HOP * rounds_of(P)
        if end > enough + 1e-9:
            text = f"{given.text}: the last message arrives after {end:g} s, {enough:g} s are enough"
            name = "one_round_too_many" if end <= enough + HOP + 1e-9 and P > 4 else "relays"
            raise STAGE.misconception(name).failure(text)


def _check_bytes(subject: Any, rng: np.random.Generator) -> None:
    """Check that a rank sends at most one (A, B) in each round."""
    for P in (8, 4):  # with 4 ranks, one round too many sends as much as an all-gather
        given = problem(rng, P, D=4)
        trace, one = _right(subject, given), given.As[0].nbytes + given.Bs[0].nbytes
        for rank in range(P):
            if (sent := trace.bytes_sent(rank)) > rounds_of(P) * one:
                text = (
                    f"{given.text}: rank {rank} sent {sent:,} bytes, {rounds_of(P)} times {one:,} are enough"
                )
                everybody = sent >= (P - 1) * one
                raise STAGE.misconception(
                    "gathers_all_transitions" if everybody else "one_round_too_many"
                ).failure(text)


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
        r"$(A', B') \circ (A, B) = (A' A,\; A' B + B')$, associative, not commutative; "
        r"after round $i$ rank $r$ has ranks $r - 2^i + 1 \dots r$",
    ),
    misconceptions=misconceptions_of("20.scan"),
    checks=(
        Check("values", 2, "visible", "the state that enters every rank, P = 1, 2, 4, 8", _check_values),
        Check("any", 1, "visible", "three ranks, five, six, seven", _check_any),
        Check("rounds", 2, "visible", "as many rounds as doublings", _check_rounds, kind="cost"),
        Check("bytes", 1, "held-out", "one (A, B) in each round", _check_bytes, kind="cost"),
    ),
)  # fmt: skip
