"""Checks of 09.traffic: the bytes that a rank sends forward and backward, computed before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("09.traffic")

NAMES = ("forward", "backward")
Asked = tuple[list[int], int, int, int, int, int]
"""lengths, rank, B, K, D, itemsize."""


@dataclass(frozen=True)
class Rule:
    """How many bytes are counted; the defaults are right."""

    kv_hops: int = -1
    courier_hops: int = 0
    tensors: int = 2
    courier_bytes: Callable[[int], int] = lambda itemsize: max(itemsize, 4)
    kv_bytes: Callable[[int], int] = lambda itemsize: itemsize
    kv_again: bool = True
    own_length: bool = False
    alone: bool = False
    towards: int = -1
    first: int = 0

    def __call__(self, lengths: list[int], rank: int, B: int, K: int, D: int, itemsize: int) -> np.ndarray:
        P = len(lengths)
        if P == 1 and not self.alone:
            return np.zeros(2)
        of = [
            lengths[rank] if self.own_length else lengths[(rank + self.towards * (t + self.first)) % P]
            for t in range(2 * P)
        ]
        token = self.tensors * B * K * D
        blocks = sum(of[: P + self.kv_hops]) * token * self.kv_bytes(itemsize)
        couriers = sum(of[: P + self.courier_hops]) * token * self.courier_bytes(itemsize)
        return np.array([blocks, self.kv_again * blocks + couriers], dtype=np.float64)


truth = Rule()
MISTAKES = (
    mistake("kv_makes_p_hops", Rule(kv_hops=0)),
    mistake("couriers_stop_short", Rule(courier_hops=-1)),
    mistake("narrow_couriers", Rule(courier_bytes=lambda itemsize: itemsize)),
    mistake("always_four_bytes", Rule(courier_bytes=lambda itemsize: 4)),
    mistake("widens_the_blocks", Rule(kv_bytes=lambda itemsize: max(itemsize, 4))),
    mistake("one_tensor", Rule(tensors=1)),
    mistake("kv_not_sent_again", Rule(kv_again=False)),
    mistake("own_length", Rule(own_length=True)),
    mistake("other_direction", Rule(towards=1)),
    mistake("counts_what_arrives", Rule(first=1)),
    mistake("sends_to_itself", Rule(alone=True)),
)


def _answered(subject: Any, asked: Asked) -> Answered:
    lengths, rank, B, K, D, itemsize = asked
    answer = subject.call(list(lengths), rank, B, K, D, itemsize)
    parts = expect_tuple(answer, NAMES)
    for name, part in zip(NAMES, parts, strict=True):
        number = isinstance(part, (int, float, np.integer, np.floating)) and not isinstance(part, bool)
        if not number or not math.isfinite(part) or int(part) != part:
            raise Failure(f"{name} should be a whole number of bytes, but is {part!r:.40}.")
    text = f"lengths {lengths}, rank {rank}, B={B}, K={K}, D={D}, {itemsize} bytes an element"
    return Answered(np.array([float(part) for part in parts]), truth(*asked), 0.0, asked, (), text)


def _verify(subject: Any, cases: Iterable[Asked]) -> None:
    compare_all((_answered(subject, asked) for asked in cases), MISTAKES)


def _check_equal(subject: Any, rng: np.random.Generator) -> None:
    """Shards of one length, float32 and bfloat16."""
    _verify(
        subject,
        [([3] * P, int(rng.integers(P)), 1, 2, 4, itemsize) for P in (2, 3, 8) for itemsize in (4, 2)],
    )


def _check_ragged(subject: Any, rng: np.random.Generator) -> None:
    lengths = [5, 3, 4, 9]
    _verify(subject, [(lengths, rank, 2, 1, 8, 2) for rank in range(4)] + [([7, 0, 2], 1, 1, 3, 2, 4)])


def _check_any(subject: Any, rng: np.random.Generator) -> None:
    """One rank, float64, and sizes of real models."""
    cases: list[Asked] = [([6], 0, 1, 1, 2, 4), ([4, 4], 1, 1, 1, 2, 8), ([5, 1, 3], 0, 1, 1, 2, 8)]
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
        "Follow one rank through the P steps: whose K/V, and whose courier, does it send on at the end of each? Which of them not in the last step?",
        "In step t it sends the K/V of rank − t, for t = 0 … P − 2, and the courier of rank − t for t = 0 … P − 1. Each token has two vectors "
        "per K/V head. How many bytes has an element of K, and how many one of dK?",
        r"$F = 2BKD\,e\sum_{t=0}^{P-2} L_{(r-t) \bmod P}$, $\;\;G = F + 2BKD\,\max(e, 4)\sum_{t=0}^{P-1} L_{(r-t) \bmod P}$, and 0 for $P = 1$",
    ),
    misconceptions=MISTAKES,
    checks=(
        Check("equal", 2, "visible", "shards of one length, float32 and bfloat16", _check_equal),
        Check("ragged", 1, "visible", "shards of different lengths", _check_ragged),
        Check("any", 1, "held-out", "one rank, float64, real sizes", _check_any),
    ),
)  # fmt: skip
