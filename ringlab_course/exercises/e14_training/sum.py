"""Checks of 14.sum: the gradients of weights that every rank has a copy of, summed over the ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringlab import oracle
from ringlab_course.checking.answers import expect_arrays, expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all, compare_suspecting
from ringlab_course.checking.failures import Crashed
from ringlab_course.checking.numbers import random
from ringlab_course.checking.wrong_answers import misconceptions_of

BOUND = 16 * float(np.finfo(np.float32).eps)
SHAPES = ((3, 2), (4,), (2, 2, 2), (1,))
NAMES = tuple(f"gradient {number}" for number in range(len(SHAPES)))
Gradients = list[torch.Tensor | None]


@dataclass(frozen=True)
class Problem:
    """The weights, which are equal on all ranks, and each rank's gradients.

    A gradient is None if the rank's tokens did not use the weight.
    """

    weights: list[torch.Tensor]
    gradients: list[Gradients]
    text: str

    def sums(self) -> tuple[np.ndarray, ...]:
        """Return the sums of all ranks' gradients in float64, one for each weight."""
        return tuple(
            sum(
                (oracle.float64(own[number]) for own in self.gradients if own[number] is not None),
                np.zeros(weight.shape),
            )
            for number, weight in enumerate(self.weights)
        )


def problem(rng: np.random.Generator, P: int, *, missing: bool = False) -> Problem:
    """Return random gradients.

    With `missing`, each weight lacks a gradient on some ranks, and the first weight has one on rank 0 only.
    """
    weights = [random(rng, *shape) for shape in SHAPES]
    gradients: list[Gradients] = [[random(rng, *shape) for shape in SHAPES] for _ in range(P)]
    if missing:
        for number in range(len(SHAPES)):
            gradients[(number + 1) % P][number] = None
        for rank in range(1, P):
            gradients[rank][0] = None
    return Problem(weights, gradients, f"P={P}{', some gradients None' if missing else ''}")


def _narrow(rng: np.random.Generator, P: int = 8) -> Problem:
    """Return bfloat16 gradients whose sum in bfloat16 is wrong, because 256 + 1 is rounded to 256.

    They are multiples of a random power of two: 256 on the first rank, −64 on the last rank and 1 on the others.
    """
    weights = [random(rng, *shape).bfloat16() for shape in SHAPES]
    unit = 2.0 ** rng.integers(-30, 30)
    sizes = [256 * unit, *[unit] * (P - 2), -64 * unit]
    gradients = [[torch.full_like(x, size) for x in weights] for size in sizes]
    return Problem(
        weights,
        gradients,
        f"P={P}, bfloat16, in units of {unit:g}: 256 on rank 0, −64 on rank {P - 1}, else 1",
    )


def _run(subject: Any, given: Problem) -> Any:
    P = len(given.gradients)
    try:
        return subject.run_ring(P, [given.weights] * P, given.gradients)
    except Crashed as crash:
        stuck = re.search(r"DeadlockError|UnreceivedError|PeerDiedError|MismatchError", crash.message)
        absent = any(x is None for own in given.gradients for x in own)
        if stuck and absent:
            raise STAGE.misconception("leaves_out_none").failure(
                f"{given.text}\n{crash.counterexample}"
            ) from None
        raise


def _answers(subject: Any, cases: Sequence[Problem], bound: float) -> Iterator[Answered]:
    for given in cases:
        yield from _of_run(_run(subject, given).results, given, bound)


def _of_run(results: Sequence[Any], given: Problem, bound: float) -> Iterator[Answered]:
    truth = given.sums()
    for rank, answer in enumerate(results):
        parts = expect_tuple(answer, NAMES)
        for part, own, name in zip(parts, given.gradients[rank], NAMES, strict=True):
            if part is None and own is None:
                raise STAGE.misconception("keeps_none").failure(f"{given.text}: rank {rank}, {name}")
        got = expect_arrays(parts, truth, NAMES)
        for part, weight in zip(parts, given.weights, strict=True):
            if str(part.dtype).removeprefix("torch.") != str(weight.dtype).removeprefix("torch."):
                raise STAGE.misconception("another_dtype").failure(
                    f"{given.text}: {part.dtype} for {weight.dtype}"
                )
        yield Answered(got, truth, bound, names=NAMES, text=f"{given.text}: rank {rank}")


def _verify(subject: Any, *cases: Problem) -> None:
    compare_all(_answers(subject, cases, BOUND))


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, *(problem(rng, P) for P in (1, 2, 3)))


def _check_none(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, *(problem(rng, P, missing=True) for P in (2, 3)))


def _check_messages(subject: Any, rng: np.random.Generator) -> None:
    """Check that a rank makes at most 2(P − 1) exchanges.

    all_reduce makes P − 1 exchanges. A ring of reduce-scatter and all-gather makes twice as many.
    """
    P = 3
    given = problem(rng, P)
    run = _run(subject, given)
    compare_all(_of_run(run.results, given, BOUND))
    trace = run.trace
    for rank in range(P):
        if (rounds := trace.rounds(rank)) > 2 * (P - 1):
            text = f"{given.text}, {len(SHAPES)} weights: rank {rank} made {rounds} exchanges, {P - 1} are enough"
            raise STAGE.misconception("a_message_for_each").failure(text)


def _check_bfloat16(subject: Any, rng: np.random.Generator) -> None:
    answers = list(_answers(subject, [_narrow(rng)], 2.0**-8))
    compare_suspecting(answers, STAGE.misconception("narrow_sums"))


STAGE = Stage(
    id="14.sum",
    function="sum_gradients",
    title="The sum of gradients",
    kind="ring",
    hints=(
        "Each rank's loss was divided by the number of tokens on all ranks. How, then, do their gradients become one?",
        "Replace None by zeros and join all gradients to one vector, wide enough for sums. Reduce it once. Then give each weight "
        "its part back, in its shape and dtype.",
        r"$\nabla_w \mathcal{L} = \nabla_w \sum_r \mathrm{share}_r = \sum_r \nabla_w\, \mathrm{share}_r$",
    ),
    misconceptions=misconceptions_of("14.sum"),
    checks=(
        Check("values", 2, "visible", "sums, the same on every rank, P = 1, 2, 3", _check_values),
        Check("none", 1, "visible", "weights that a rank's tokens did not touch", _check_none),
        Check("messages", 1, "visible", "one reduction for all weights", _check_messages, kind="cost"),
        Check("bfloat16", 1, "visible", "bfloat16 weights: sums in float32, results in bfloat16", _check_bfloat16),
    ),
)  # fmt: skip
