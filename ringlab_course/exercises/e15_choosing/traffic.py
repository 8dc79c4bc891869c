"""Checks of 15.traffic: the bytes that a rank sends under each schedule, None for an impossible schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import allgather_traffic, hybrid_traffic, ring_traffic
from ringlab.errors import CostError
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.numbers import expect_number
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of

Layer = dict[str, int]
Asked = tuple[Layer, int, int, str, int]
"""The arguments layer, S, P, schedule and ulysses."""
DTYPES = {1: "float8", 2: "bfloat16", 4: "float32", 8: "float64"}
NONE = -1.0
"""The number that represents None. No right number of bytes is negative."""


def sizes_of(layer: Layer) -> Attention:
    """Return the layer in the type of the cost model."""
    return Attention(layer["B"], layer["H"], layer["K"], layer["D"], DTYPES[layer["itemsize"]])


def truth(layer: Layer, S: int, P: int, schedule: str, ulysses: int) -> np.ndarray:
    """Return the cost model's number of bytes, or NONE if the cost model refuses the schedule."""
    sizes = sizes_of(layer)
    if P % ulysses:
        return np.array([NONE])
    try:
        if schedule in ("ring", "allgather"):
            formula = ring_traffic if schedule == "ring" else allgather_traffic
            return np.array([float(formula(sizes, S, P).total_bytes)])
        return np.array([float(hybrid_traffic(sizes, S, P // ulysses, ulysses).total_bytes)])
    except CostError:
        return np.array([NONE])


def shareable(H: int, K: int, U: int) -> bool:
    """Return whether U ranks can share H query heads and K key/value heads."""
    return H % U == 0 and (K % U == 0 or U % K == 0)


def _answered(subject: Any, asked: Asked) -> Answered:
    layer, S, P, schedule, ulysses = asked
    answer = subject.call(dict(layer), S, P, schedule, ulysses)
    got = np.array([NONE if answer is None else expect_number(answer)])
    sizes = ", ".join(f"{name}={value}" for name, value in layer.items())
    text = f"{schedule}, U={ulysses}, P={P}, S={S}, {sizes}{'; None is −1' if NONE in (got[0], truth(*asked)[0]) else ''}"
    return Answered(got, truth(*asked), 0.0, names=("bytes",), text=text)


def _verify(subject: Any, cases: Iterable[Asked]) -> None:
    seen: list[Answered] = []

    def answers() -> Iterator[Answered]:
        for asked in cases:
            seen.append(_answered(subject, asked))
            yield seen[-1]

    try:
        compare_all(answers())
    except Failure as failure:
        if failure.misconception is None and _never_refuses(seen):
            never = mistakes_of("15.traffic")("never_refuses")
            raise never.failure(failure.counterexample) from None
        raise


def _never_refuses(answers: list[Answered]) -> bool:
    """Return whether each answer that should be None is a number, and all other answers are right.

    The number depends on how the learner's formula rounds.
    """
    refused = [given for given in answers if given.truth[0] == NONE]
    right = all(given.answer[0] == given.truth[0] for given in answers if given.truth[0] != NONE)
    return bool(refused) and right and all(given.answer[0] > 0 for given in refused)


def _layer(H: int, K: int, *, B: int = 1, D: int = 8, itemsize: int = 2) -> Layer:
    return {"B": B, "H": H, "K": K, "D": D, "itemsize": itemsize}


def _tokens(rng: np.random.Generator, P: int) -> int:
    """Return a random sequence length divisible by P, which is unlikely to be drawn twice."""
    return int(rng.integers(1, 1_000_000)) * P


def _check_ring(subject: Any, rng: np.random.Generator) -> None:
    """Check ring and all-gather, with one query head per K/V head, and with eight."""
    _verify(
        subject,
        [
            (_layer(8, K), _tokens(rng, P), P, name, 1)
            for P, K in ((2, 8), (4, 8), (4, 1))
            for name in ("ring", "allgather")
        ],
    )


def _check_ulysses(subject: Any, rng: np.random.Generator) -> None:
    _verify(
        subject,
        [(_layer(16, K), _tokens(rng, P), P, "ulysses", P) for P, K in ((2, 16), (4, 16), (4, 4), (8, 8))],
    )  # fmt: skip


def _check_few_heads(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on more ranks than K/V heads, and heads that the ranks cannot share."""
    asked = [(16, 2, 8), (16, 1, 4), (16, 16, 3), (12, 4, 6), (24, 3, 6), (8, 8, 16)]
    _verify(
        subject,
        [(_layer(H, K), _tokens(rng, P), P, "ulysses", P) for H, K, P in asked],
    )


def _check_hybrid(subject: Any, rng: np.random.Generator) -> None:
    """Check answers for hybrids, which put U ranks into each row.

    There are as many K/V heads as ranks in a row, more, or fewer. In one case U does not divide the ranks,
    and in one case a single row holds all ranks.
    """
    asked = [
        (8, 8, 8, 2),
        (8, 4, 4, 2),
        (16, 2, 8, 4),
        (16, 2, 12, 3),
        (12, 6, 8, 3),
        (64, 8, 32, 8),
        (8, 8, 4, 4),
    ]
    _verify(
        subject,
        [
            (_layer(H, K, B=2), _tokens(rng, P), P, "ulysses" if U == P else "hybrid", U)
            for H, K, P, U in asked
        ],
    )


def _check_any(subject: Any, rng: np.random.Generator) -> None:
    cases: list[Asked] = []
    for _ in range(12):
        K, group, P = 2 ** int(rng.integers(0, 5)), 2 ** int(rng.integers(0, 5)), 2 ** int(rng.integers(1, 8))
        layer = _layer(K * group * int(rng.choice([1, 3])), K, B=int(rng.integers(1, 4)), D=64, itemsize=int(rng.choice([1, 2, 4])))  # fmt: skip
        name = str(rng.choice(["ring", "allgather", "ulysses", "hybrid"]))
        U = {"ring": 1, "allgather": 1, "ulysses": P}.get(name, 2 ** int(rng.integers(1, 6)))
        cases.append((layer, _tokens(rng, P), P, name, U))
    _verify(subject, cases)


STAGE = Stage(
    id="15.traffic",
    function="bytes_sent",
    title="Bytes, by schedule",
    hints=(
        "Take one token of one rank. Which of its tensors does the rank send, in how many heads, to how many other ranks?",
        "A ring of P/U members makes P/U − 1 hops, with K and V. In the all-to-alls, each of the U − 1 others in the row gets its share of q's heads and the K/V heads "
        "that it needs; the output travels back like q. A hybrid does both: after the all-to-all its ring moves the tokens of U ranks. Which U can share H and K heads?",
        r"$h = \max(1, \lfloor K/U \rfloor)$, $\;BDe\,\frac SP\left[(U-1)\left(2\frac HU + 2h\right) + \left(\frac PU - 1\right)2\,U h\right]$, the first term for $U > 1$",
    ),
    misconceptions=misconceptions_of("15.traffic"),
    checks=(
        Check("ring", 2, "visible", "ring and all-gather, all heads and 8:1", _check_ring),
        Check("ulysses", 2, "visible", "the all-to-alls of Ulysses", _check_ulysses),
        Check("few_heads", 2, "visible", "more ranks than K/V heads, and heads that cannot be shared", _check_few_heads),
        Check("hybrid", 2, "visible", "rows of ranks, and the rings between them", _check_hybrid),
        Check("any", 1, "held-out", "random layers and schedules", _check_any),
    ),
)  # fmt: skip
