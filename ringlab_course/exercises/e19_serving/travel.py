"""Checks of 19.travel: the bytes of a prefill that sends keys and values, or sends queries and partials."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.numbers import expect_number
from ringlab_course.checking.wrong_answers import misconceptions_of

NAMES = ("keys and values", "queries")
Asked = tuple[int, int, int, int, int, int, int]
"""The arguments prefix, new, P, H, K, D and itemsize."""


def truth(prefix: int, new: int, P: int, H: int, K: int, D: int, itemsize: int) -> np.ndarray:
    """Return the bytes that a rank sends if keys and values travel, and if queries and partials travel."""
    keys = (prefix + new) // P * 2 * K * D * itemsize
    partials = H * (D + 1) * max(itemsize, 4)
    rows = new // P * (H * D * itemsize + partials)
    return np.array([(P - 1) * keys, (P - 1) * rows], dtype=np.float64)


def _answers(subject: Any, cases: list[Asked]) -> Iterator[Answered]:
    for asked in cases:
        parts = expect_tuple(subject.call(*asked), NAMES)
        got = np.array([expect_number(part) for part in parts])
        prefix, new, P, H, K, D, itemsize = asked
        text = f"prefix={prefix}, new={new}, P={P}, H={H}, K={K}, D={D}, {itemsize} bytes an element"
        yield Answered(got, truth(*asked), 0.0, text=text)


def _drawn(rng: np.random.Generator, itemsize: int, P: int | None = None) -> Asked:
    P = int(rng.integers(2, 9)) if P is None else P
    K = int(rng.integers(1, 5))
    prefix, new = (P * int(n) for n in rng.integers(1, 400, 2))
    return prefix, new, P, K * int(rng.integers(2, 5)), K, 2 * int(rng.integers(2, 65)), itemsize


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    compare_all(_answers(subject, [_drawn(rng, itemsize) for itemsize in (4, 2, 2)]))


def _check_any(subject: Any, rng: np.random.Generator) -> None:
    """Check answers for one rank, float64, no prefix, and sizes of a real model."""
    prefix, new, _, H, K, D, _ = _drawn(rng, 2)
    one = prefix, new, 1, H, K, D, 2
    _, new, P, H, K, D, _ = _drawn(rng, 2)
    real = 8 * int(rng.integers(1000, 100_000)), 8 * int(rng.integers(10, 1000)), 8, 64, 8, 128, 2
    compare_all(_answers(subject, [one, _drawn(rng, 8), (0, new, P, H, K, D, 2), real]))


STAGE = Stage(
    id="19.travel",
    function="bytes_sent",
    title="Who should travel",
    hints=(
        "If queries travel, where are their results when they have been everywhere, and who needs them?",
        "Keys and values: every rank passes on P − 1 blocks of all tokens, prefix and new, with the K/V heads. Queries: P − 1 blocks of "
        "new tokens, with the query heads, and for each a partial that goes back to its owner: out and lse, as wide as a state.",
        r"$(P-1)\frac{p + n}{P}\,2KDe$ and $(P-1)\frac{n}{P}\,H\,(De + (D+1)\max(e, 4))$",
    ),
    misconceptions=misconceptions_of("19.travel"),
    checks=(
        Check("values", 1, "visible", "both, to the byte, in float32 and bfloat16", _check_values),
        Check("any", 1, "held-out", "one rank, float64, no prefix, sizes of a real model", _check_any),
    ),
)  # fmt: skip
