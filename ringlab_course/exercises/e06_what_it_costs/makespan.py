"""Checks of 06.makespan: when the last rank of a ring ends, with and without double buffering."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.numbers import answered_number
from ringlab_course.exercises.e06_what_it_costs.makespan_mistakes import (
    MISTAKES,
    makespan,
)

Array = np.ndarray


def _compare(subject: Any, rings: Iterable[tuple[Any, Any]], text: str = "") -> None:
    """Compare all rings' makespans, each with one buffer and with two; a mistake is named only if it fits them all."""
    compare_all(_cases(subject, rings, text), MISTAKES)


def _cases(subject: Any, rings: Iterable[tuple[Any, Any]], text: str) -> Iterator[Answered]:
    for compute_s, hop_s in rings:
        for overlapped in (False, True):
            inputs = (np.asarray(compute_s, float), np.asarray(hop_s, float), overlapped)
            how = "double buffered" if overlapped else "one buffer"
            figures = text or f"compute_s {inputs[0].tolist()}, hop_s {inputs[1].tolist()}"
            answer, truth = subject.call(*inputs), makespan(*inputs)
            yield answered_number(answer, truth, inputs, f"{figures}, {how}", "s")


def _check_uniform(subject: Any, rng: np.random.Generator) -> None:
    # With two ranks, and with them alone, a hop that is never hidden and a first one that is not look the same.
    sizes = ((1, 1.0, 4.0), (3, 4.0, 1.0), (3, 1.0, 4.0), (2, 4.0, 1.0), (3, 2.0, 0.0))
    _compare(subject, [(np.full((P, P), compute), np.full(P, hop)) for P, compute, hop in sizes])


def causal(P: int, seconds: float) -> Array:
    """Return (P, P) seconds of the contiguous causal ring: whole blocks, half of one's own, nothing of the future."""
    rank, step = np.indices((P, P))
    origin = (rank - step) % P
    return np.where(origin < rank, seconds, np.where(origin == rank, seconds / 2, 0.0))


def _check_unequal(subject: Any, rng: np.random.Generator) -> None:
    """Figures at which mistakes give different numbers; not so those that differ only where links do."""
    small = (([[1, 3], [4, 1]], 1.0), ([[6, 3, 2], [1, 4, 7], [1, 5, 6]], 2.0), (causal(4, 4.0), 1.0))
    _compare(subject, [(compute_s, np.full(len(compute_s), hop)) for compute_s, hop in small])


def _check_links(subject: Any, rng: np.random.Generator) -> None:
    """Three links of different speed, again so that every mistake gives another number; then two nodes."""
    work = np.array([[7, 3, 7], [2, 5, 2], [6, 3, 5]])
    _compare(subject, [(work, np.array([2, 9, 3])), (causal(4, 4.0), np.array([0.5, 3.0, 0.5, 3.0]))])


def _check_random(subject: Any, rng: np.random.Generator) -> None:
    for P in (2, 5, 8, 13):
        work = rng.integers(0, 64, (P, P)) / 8
        hops = rng.integers(0, 64, P) / 8
        _compare(subject, [(work, hops)], f"P={P}, unequal work, unequal links")


HINTS = (
    "At what time can rank r begin its step 1? Name everything that must have happened before.",
    "Keep one array with the time at which each rank is ready for its next step, and go step by step. Ready and computing "
    "give `done`. An exchange is posted at `ready` or at `done`, depending on the buffers. From the posts of r and r + 1 "
    "follows when their message is over. np.roll brings neighbours side by side.",
    r"$m_r = \max(p_r, p_{r+1}) + h_r$, $\;\mathrm{ready}_r \leftarrow \max(\mathrm{done}_r, m_r, m_{r-1})$, with $p$ = "
    r"ready (double buffered) or done",
)

STAGE = Stage(
    id="06.makespan",
    function="makespan",
    title="When the last rank ends",
    hints=HINTS,
    misconceptions=MISTAKES,
    checks=(
        Check(
            "uniform",
            3,
            "visible",
            "all ranks alike, hops shorter and longer than the computation",
            _check_uniform,
        ),
        Check("unequal", 3, "visible", "ranks with different work, as under a causal mask", _check_unequal),
        Check("links", 2, "visible", "links of different speed, as between nodes", _check_links),
        Check("random", 2, "held-out", "many ranks, any work, any links", _check_random),
    ),
)
