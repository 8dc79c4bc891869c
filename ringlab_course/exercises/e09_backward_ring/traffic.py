"""Checks of 09.traffic: a function that predicts the bytes of the backward ring."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import misconceptions_of

NAMES = ("forward", "backward")
Asked = tuple[list[int], int, int, int, int, int]
"""The arguments lengths, rank, B, K, D and itemsize."""


def truth(lengths: list[int], rank: int, B: int, K: int, D: int, itemsize: int) -> np.ndarray:
    """Return the bytes that `rank` sends in the forward and in the backward.

    Both passes send P − 1 blocks of K/V. The backward also sends P couriers, in float32 at least.
    """
    P = len(lengths)
    if P == 1:
        return np.zeros(2)
    sent, token = [lengths[(rank - step) % P] for step in range(P)], 2 * B * K * D
    blocks = sum(sent[:-1]) * token * itemsize
    return np.array([blocks, blocks + sum(sent) * token * max(itemsize, 4)], dtype=np.float64)


def _answered(subject: Any, asked: Asked) -> Answered:
    lengths, rank, B, K, D, itemsize = asked
    answer = subject.call(list(lengths), rank, B, K, D, itemsize)
    parts = expect_tuple(answer, NAMES)
    counts = [_count(name, part) for name, part in zip(NAMES, parts, strict=True)]
    text = f"lengths {lengths}, rank {rank}, B={B}, K={K}, D={D}, {itemsize} bytes an element"
    return Answered(np.array(counts), truth(*asked), 0.0, text=text)


def _count(name: str, part: Any) -> float:
    """Return a number of bytes as a float. NumPy's and torch's numbers are valid too.

    Raises: Failure for anything else.
    """
    value = part.item() if getattr(part, "shape", None) == () else part
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or int(value) != value:
        raise Failure(f"{name} should be a whole number of bytes, but is {part!r:.40}.")
    return float(value)


def _verify(subject: Any, cases: Iterable[Asked]) -> None:
    compare_all(_answered(subject, asked) for asked in cases)


def _asked(rng: np.random.Generator, lengths: list[int], itemsize: int) -> Asked:
    """Return these lengths with a drawn rank and drawn sizes of a model."""
    B, K, D = int(rng.integers(1, 4)), int(rng.integers(1, 9)), 2 * int(rng.integers(1, 65))
    return lengths, int(rng.integers(len(lengths))), B, K, D, itemsize


def _lengths(rng: np.random.Generator, P: int, most: int = 100) -> list[int]:
    return [int(n) for n in rng.choice(np.arange(1, most), P, replace=False)]


def _check_equal(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on shards of equal length in float32, bfloat16 and float64, and a ring of one rank."""
    sizes = [(P, itemsize) for P in (2, 3, 8) for itemsize in (4, 2)]
    cases = [([int(rng.integers(1, 1000))] * P, itemsize) for P, itemsize in (*sizes, (3, 8), (1, 4))]
    _verify(subject, [_asked(rng, *case) for case in cases])


def _check_ragged(subject: Any, rng: np.random.Generator) -> None:
    """Check answers for four ranks with shards of different lengths, and for a ring with an empty shard."""
    _, _, B, K, D, _ = _asked(rng, [1], 2)
    lengths = _lengths(rng, 4)
    cases: list[Asked] = [(lengths, rank, B, K, D, 2) for rank in range(4)]
    first, last = _lengths(rng, 2)
    _verify(subject, [*cases, _asked(rng, [first, 0, last], 4)])


def _check_any(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on a ring of one rank, float64, and sizes of real models."""
    cases = [_asked(rng, _lengths(rng, P), itemsize) for P, itemsize in ((1, 4), (2, 8), (3, 8))]
    for _ in range(3):
        P = int(rng.integers(3, 33))
        lengths = [int(n) for n in rng.integers(1000, 20000, P)]
        cases.append((lengths, int(rng.integers(P)), 1, 8, 128, 2))
    _verify(subject, cases)


STAGE = Stage(
    id="09.traffic",
    function="bytes_sent",
    title="Bytes, before anything runs",
    hints=(
        "Follow one rank through the P steps. Whose K/V and whose courier does it send on in each of them? "
        "Which of the two does it not send in the last step?",
        "In step t a rank sends the K/V of rank − t, for t = 0 … P − 2, and the courier of rank − t, for t = 0 … P − 1. "
        "Each token has two vectors per K/V head. How many bytes does an element of K have, and how many an element of dK?",
        r"$F = 2BKD\,e\sum_{t=0}^{P-2} L_{(r-t) \bmod P}$, $\;\;G = F + 2BKD\,\max(e, 4)\sum_{t=0}^{P-1} L_{(r-t) \bmod P}$, and 0 for $P = 1$",
    ),
    misconceptions=misconceptions_of("09.traffic"),
    checks=(
        Check("equal", 2, "visible", "shards of one length, in three dtypes; one rank alone", _check_equal),
        Check("ragged", 1, "visible", "shards of different lengths", _check_ragged),
        Check("any", 1, "held-out", "one rank, float64, real sizes", _check_any),
    ),
)  # fmt: skip
