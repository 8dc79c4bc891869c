"""Checks of 06.makespan: the time when the last rank of a ring ends, with and without double buffering."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.numbers import answered_number
from ringlab_course.checking.wrong_answers import misconceptions_of

Array = np.ndarray
Ring = tuple[Array, Array]
"""The arguments compute_s and hop_s of a ring."""


def makespan(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    """Return the seconds until the last rank ends, the right answer of this stage.

    A message from rank r to the next rank begins when both ranks have posted the exchange, and takes
    hop_s[r]. An exchange ends when the rank's own message has left and the message from the previous rank has
    arrived.
    """
    ready = np.zeros(len(hop_s))
    for step in range(len(hop_s) - 1):
        done = ready + compute_s[:, step]
        posted = ready if overlapped else done
        messages = np.maximum(posted, np.roll(posted, -1)) + hop_s
        ready = np.maximum(done, np.maximum(messages, np.roll(messages, 1)))
    return float(np.max(ready + compute_s[:, -1]))


def _compare(subject: Any, rings: Iterable[Ring], text: str = "") -> None:
    """Compare makespans with the right ones, both for "compute, then shift" and for "post, then compute"."""
    compare_all(_cases(subject, rings, text))


def _cases(subject: Any, rings: Iterable[Ring], text: str) -> Iterator[Answered]:
    for compute_s, hop_s in rings:
        for overlapped in (False, True):
            inputs = (np.asarray(compute_s, float), np.asarray(hop_s, float), overlapped)
            how = "post, then compute" if overlapped else "compute, then shift"
            figures = (
                f"P={len(hop_s)}, {text}"
                if text
                else f"compute_s {inputs[0].tolist()}, hop_s {inputs[1].tolist()}"
            )
            yield answered_number(
                subject.call(*inputs), makespan(*inputs), text=f"{figures}, {how}", unit="s"
            )


def _check_uniform(subject: Any, rng: np.random.Generator) -> None:
    # A ring of two ranks has one hop, so "no hop is hidden" and "the first hop is not hidden" give the same
    # time. In rings of more ranks the times differ.
    long, short = (rng.integers(*ends, 6).astype(float) for ends in ((50, 100), (1, 50)))
    sizes = (
        (1, long[0], short[0]),
        (3, long[1], short[1]),
        (3, short[2], long[2]),
        (2, long[3], short[3]),
        (3, long[4], 0.0),
        (4, short[5], long[5] + 50),
    )
    _compare(subject, [(np.full((P, P), compute), np.full(P, hop)) for P, compute, hop in sizes])


def causal(P: int, seconds: float) -> Array:
    """Return the seconds (P, P) [rank, step] of the contiguous causal ring.

    A block of an earlier rank takes `seconds`, the rank's own block takes half of that, and a block of a later
    rank takes no time.
    """
    rank, step = np.indices((P, P))
    origin = (rank - step) % P
    return np.where(origin < rank, seconds, np.where(origin == rank, seconds / 2, 0.0))


def _any(rng: np.random.Generator, P: int, hops: int) -> Ring:
    """Return a ring of unequal work and links, with `hops` different link times."""
    return rng.integers(1, 20, (P, P)), np.resize(rng.integers(1, 20, hops), P)


def _check_unequal(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on rings with unequal work.

    All links of a ring are alike, so that mistakes about links give the right times. There are many rings,
    because on a single ring many mistakes give the same times.
    """
    rings = [_any(rng, P, 1) for P in (2, 3, 3, 3, 4, 4, 4, 4)]
    _compare(subject, [*rings, (causal(4, 2.0 * rng.integers(5, 50)), np.full(4, rng.integers(1, 9)))])


def _check_links(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on rings with links of different speed, then a ring over two nodes."""
    slow, fast = float(rng.integers(10, 50)), float(rng.integers(1, 10))
    rings = [_any(rng, P, P) for P in (3, 3, 3, 4, 4, 4, 4)]
    _compare(subject, [*rings, (causal(4, 2.0 * rng.integers(5, 50)), np.array([fast, slow, fast, slow]))])


def _check_random(subject: Any, rng: np.random.Generator) -> None:
    rings = [(rng.integers(0, 512, (P, P)) / 8, rng.integers(0, 512, P) / 8) for P in (2, 5, 8, 13)]
    _compare(subject, rings, "unequal work, unequal links")


HINTS = (
    "When can rank r begin its step 1? Name everything that must have happened by then.",
    "Keep one array with the time at which each rank is ready for its next step, and go step by step. The computation "
    "takes a rank from `ready` to `done`. It posts its exchange at `ready` or at `done`, depending on `overlapped`. The "
    "posts of r and r + 1 determine when their message is over. np.roll shifts an array by one rank.",
    r"$m_r = \max(p_r, p_{r+1}) + h_r$, $\;\mathrm{ready}_r \leftarrow \max(\mathrm{done}_r, m_r, m_{r-1})$, with $p$ = "
    r"ready (post, then compute) or done",
)

STAGE = Stage(
    id="06.makespan",
    function="makespan",
    title="When the last rank ends",
    hints=HINTS,
    misconceptions=misconceptions_of("06.makespan"),
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
