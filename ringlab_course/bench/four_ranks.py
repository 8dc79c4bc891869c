"""The forward ring of exercise 05 on four ranks: the same checks as its contract, none with more ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ringlab_course.bench.judge_watch import Watched
from ringlab_course.checking.contract import Check, Exercise
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.ring_mistakes import FORWARD
from ringlab_course.checking.shards import compare_ranks, expect_bytes, expect_neighbours, narrow, shards

RANKS = 4
STAGE = "05.forward"
FOUND = tuple(f"{STAGE}:{check}" for check in ("values", "rounds", "bytes", "sloped"))
"""The checks of exercise 05 whose wrong submissions four ranks tell from right ones."""


class FourRanks(Watched):
    """Grades by the contract of four ranks, whatever the exercise."""

    def __call__(self, path: Path, exercise: Exercise | str | None, **options: Any) -> Any:
        return super().__call__(path, four_ranks(), **options)


def four_ranks() -> Exercise:
    """Return the contract: values, exchanges and bytes, large scores, bfloat16."""
    exercise = load_exercise("05")
    checks = (
        Check("values", 3, "visible", "out and lse equal full attention", _values),
        Check("traffic", 3, "visible", "3 exchanges, and the bytes of K and V", _traffic, kind="cost"),
        Check("sloped", 2, "stress", "large scores that grow along the sequence", _sloped),
        Check("bfloat16", 1, "held-out", "bfloat16 inputs, float32 in the state", _bfloat16),
    )
    return replace(exercise, stages=(replace(exercise.stage(STAGE), checks=checks),))


def _values(subject: Any, rng: np.random.Generator) -> None:
    for L, H, K in ((1, 1, 1), (4, 2, 1), (3, 4, 2)):
        case = shards(rng, [L] * RANKS, H, K, 8)
        compare_ranks(case, case.run(subject).results, FORWARD)


def _traffic(subject: Any, rng: np.random.Generator) -> None:
    for H, K in ((1, 1), (4, 2)):
        case = shards(rng, [4] * RANKS, H, K, 4)
        trace = case.run(subject).trace
        expect_neighbours(trace, case.text)
        expect_bytes(case, trace, H // K)


def _sloped(subject: Any, rng: np.random.Generator) -> None:
    case = shards(rng, [3] * RANKS, 1, 1, 4, size=30.0)
    for origin, k in enumerate(case.ks):
        k += 3.0 * origin
    compare_ranks(case, case.run(subject).results, FORWARD)


def _bfloat16(subject: Any, rng: np.random.Generator) -> None:
    case = narrow(shards(rng, [4] * RANKS, 1, 1, 16))
    compare_ranks(case, case.run(subject).results, FORWARD)
