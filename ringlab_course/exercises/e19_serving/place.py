"""Checks of 19.place: the rank and the slot of each token in a cache that is divided among ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_arrays
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.wrong_answers import misconceptions_of

NAMES = ("ranks", "slots")
Answer = tuple[np.ndarray, np.ndarray]


def truth(tokens: Any, interleave: int, P: int) -> Answer:
    """Return the rank and the slot of each token."""
    t = np.asarray(tokens, np.int64)
    return t // interleave % P, t // (interleave * P) * interleave + t % interleave


def _answers(subject: Any, cases: Sequence[tuple[np.ndarray, int, int]]) -> Iterator[Answered]:
    for tokens, interleave, P in cases:
        inputs = torch.from_numpy(tokens), interleave, P
        right = truth(*inputs)
        got = expect_arrays(subject.call(*inputs), right, NAMES)
        shown = ", ".join(map(str, tokens[:12].tolist())) + (", …" if len(tokens) > 12 else "")
        text = f"interleave={interleave}, P={P}, tokens {shown}"
        yield Answered(got, right, 0.0, names=NAMES, text=text)


def _check_first(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on the first tokens of a sequence, in order, for more than one turn around the ranks."""
    dealt = [(1, 2), (2, 2), (4, 3), (int(rng.integers(3, 9)), 2)]
    drawn = [
        (np.arange(2 * interleave * P + int(rng.integers(1, 500))), interleave, P) for interleave, P in dealt
    ]
    compare_all(_answers(subject, drawn))


def _check_any(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on tokens far into the sequence in any order, a single rank, and no token."""
    drawn = [
        (rng.integers(0, 1 << 20, 40), int(rng.integers(1, 70)), int(rng.integers(2, 70))) for _ in range(4)
    ]
    none = np.zeros(0, np.int64), int(rng.integers(1, 500)), 2
    compare_all(_answers(subject, [*drawn, (rng.integers(0, 1000, 9), 16, 1), none]))


STAGE = Stage(
    id="19.place",
    function="place",
    title="Pieces on ranks",
    hints=(
        "Number the pieces of the sequence from 0. Which pieces does rank 1 of three have, and which of them is its second?",
        "The piece of token t has a number; its remainder by P is the rank, its quotient says how many pieces of this rank come "
        "before it. Each of these is full.",
        r"$n = \lfloor t / \mathrm{interleave} \rfloor$, $\;\mathrm{rank} = n \bmod P$, "
        r"$\;\mathrm{slot} = \lfloor n / P \rfloor \cdot \mathrm{interleave} + (t \bmod \mathrm{interleave})$",
    ),
    misconceptions=misconceptions_of("19.place"),
    checks=(
        Check("first", 1, "visible", "the first turns around the ranks", _check_first),
        Check("any", 1, "held-out", "tokens anywhere, one rank, no token", _check_any),
    ),
)  # fmt: skip
