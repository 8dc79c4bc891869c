"""Checks of 07.makespan: the time at which the last rank of a ring ends, and how long each rank waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ringlab import layout as layouts
from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.wrong_answers import misconceptions_of
from ringlab_course.exercises.e07_causal_imbalance.runs import token_fold
from ringlab_course.exercises.e07_causal_imbalance.work import truth as pairs

NAMES = ("makespan", "idle")
DRAWN = 100
"""The number of random tables in a check.

Two mistakes, or a mistake and the truth, differ on at least a tenth of such tables.
"""


def truth(seconds: np.ndarray, hop: float) -> tuple[float, np.ndarray]:
    """Return (makespan, idle) of a ring that posts every exchange before it computes."""
    starts, P = np.zeros(len(seconds)), len(seconds)
    for step in range(P - 1):
        posted = np.maximum(starts, np.maximum(np.roll(starts, 1), np.roll(starts, -1)))
        starts = np.maximum(starts + seconds[:, step], posted + hop)
    makespan = float((starts + seconds[:, -1]).max())
    return makespan, makespan - seconds.sum(axis=1)


def _verify(subject: Any, cases: Iterable[tuple[np.ndarray, float, str]]) -> None:
    compare_all(_answered(subject, *case) for case in cases)


def _answered(subject: Any, seconds: np.ndarray, hop: float, text: str) -> Answered:
    makespan, idle = expect_tuple(subject.call(seconds, hop), NAMES)
    if isinstance(makespan, (int, float)):
        makespan = np.array(float(makespan))
    rows = "; ".join(" ".join(f"{x:g}" for x in row) for row in seconds) if len(seconds) <= 4 else "…"
    case = f"{text}hop {hop:g} s, seconds of the ranks' steps: {rows}"
    return Answered((makespan, idle), truth(seconds, hop), 1e-9, names=NAMES, text=case)


def _table(*rows: tuple[float, ...]) -> np.ndarray:
    return np.array(rows, dtype=np.float64)


def _sparse(rng: np.random.Generator, P: int) -> np.ndarray:
    """Return a table of P ranks with whole numbers of seconds; about half of its entries are 0."""
    return rng.integers(1, 10, (P, P)) * rng.integers(0, 2, (P, P)).astype(np.float64)


def _check_free(subject: Any, rng: np.random.Generator) -> None:
    """Try hops that cost nothing: a rank waits only for neighbours that have not begun the step."""
    delayed = (  # some ranks are late, and delay some of the other ranks but not all
        _table((1, 1), (1, 2)),
        _table((1, 0, 0), (1, 2, 0), (1, 2, 2)),
        _table((0, 0, 0, 1), (1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 1, 0)),
        _table((1, 0, 0, 0), (0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 0)),
        _table((1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 0)),
        _table((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)),
    )
    cases = [
        (table * int(rng.integers(20, 100)) + rng.integers(0, 10, table.shape), 0.0) for table in delayed
    ]
    cases += [(_sparse(rng, int(rng.integers(4, 7))), 0.0) for _ in range(DRAWN)]
    _verify(subject, [(*case, "") for case in ((_single(rng), 0.0), *cases)])


def _single(rng: np.random.Generator) -> np.ndarray:
    """Return the seconds of one rank alone."""
    return _table((int(rng.integers(100, 10_000)) / 100,))


def _check_hops(subject: Any, rng: np.random.Generator) -> None:
    """Try hops that are shorter than all steps, longer than all steps, or shorter than only some of them."""
    uniform, uneven = np.ones((3, 3)), _table((1, 0, 0), (1, 2, 0), (1, 2, 2))
    cases = [(_table((1, 1), (1, 1)), 0.5), (_table((1, 1), (1, 2)), 3.0), (uniform, 0.5), (uniform, 1.5)]
    cases += [(uneven, 0.5), (uneven, 3.0)]
    scales = rng.integers(101, 1000, len(cases)) / 100
    drawn = [(table * scale, hop * scale) for (table, hop), scale in zip(cases, scales, strict=True)]
    drawn += [(_sparse(rng, int(rng.integers(3, 6))), rng.integers(1, 40) / 10) for _ in range(DRAWN)]
    _verify(subject, [(table, float(hop), "") for table, hop in ((_single(rng), 1.0), *drawn)])


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    """Try the work of real layouts, with the same number of seconds for every visible pair."""
    makes, pace = (
        (layouts.contiguous, layouts.striped, layouts.zigzag, token_fold),
        int(rng.integers(2, 100)) / 8,
    )
    S = 8 * int(rng.integers(3, 30))
    cases = [(pairs(make(S, 4)) * pace, 0.0, f"{make.__name__}, S={S}, P=4: ") for make in makes]
    S = int(rng.integers(50, 300))
    cases += [(pairs(layouts.zigzag(S, 8)) * pace, 5.0, f"zigzag, S={S}, P=8: ")]
    _verify(subject, cases)


def _check_chance(subject: Any, rng: np.random.Generator) -> None:
    for P in (2, 3, 5, 8, 32):
        seconds = rng.exponential(1.0, (P, P))
        _verify(subject, [(seconds, float(rng.uniform(0.0, 2.0)), f"P={P}: ")])


HINTS = (
    "Draw the time axes of three neighbouring ranks, one of them slow in step 0. A rank can begin step t + 1 once two things "
    "are over: one that it does alone, and one that takes three ranks. Which two, and when is each over?",
    "Keep one number per rank: the time at which it began the step. Both times follow from these numbers, from the row of "
    "`seconds` and from `hop`. A rank posts before it computes: so which of a neighbour's times matters? Rank 0 is a "
    "neighbour of rank P − 1.",
    r"$b_{r,t+1} = \max\bigl(b_{r,t} + s_{r,t},\; \max(b_{r-1,t},\, b_{r,t},\, b_{r+1,t}) + h\bigr)$, makespan "
    r"$= \max_r\,(b_{r,P-1} + s_{r,P-1})$",
)

STAGE = Stage(
    id="07.makespan",
    function="who_waits",
    title="Who waits",
    hints=HINTS,
    misconceptions=misconceptions_of("07.makespan"),
    checks=(
        Check("free", 2, "visible", "hops that cost nothing", _check_free),
        Check("hops", 2, "visible", "hops that take time", _check_hops),
        Check("layouts", 1, "visible", "the work of real layouts", _check_layouts),
        Check("chance", 1, "held-out", "any seconds, up to 32 ranks", _check_chance),
    ),
)
