"""Checks of 13.seconds: one number that summarises the times of all ranks in all rounds of a measurement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.numbers import answered_number
from ringlab_course.checking.wrong_answers import misconceptions_of

Array = np.ndarray


def seconds(times_s: Array, warmup: int) -> float:
    """Return the median over counted rounds of the slowest rank's seconds, the right answer of this stage."""
    return float(np.median(times_s[warmup:].max(axis=1)))


def _compare(subject: Any, cases: Iterable[tuple[Array, int]]) -> None:
    def asked() -> Iterator[Answered]:
        for times_s, warmup in cases:
            text = f"{len(times_s)} rounds of {times_s.shape[1]} ranks, the first {warmup} to warm up"
            if times_s.size <= 16:
                text += f": {np.round(times_s, 3).tolist()}"
            answer = subject.call(times_s, warmup)
            yield answered_number(answer, seconds(times_s, warmup), text=text, unit="s")

    compare_all(asked())


def rounds_of(rng: np.random.Generator, rounds: int, P: int, warmup: int = 0) -> Array:
    """Return different seconds for `rounds` × P, with one disturbed round and slow rounds to warm up."""
    times_s = rng.uniform(1.0, 2.0) + rng.permutation(np.arange(rounds * P)).reshape(rounds, P) / (rounds * P)
    times_s[rng.integers(warmup, rounds)] += 4.0  # a round that other work on the machine delayed
    times_s[:warmup] += 2.0 + np.arange(warmup)[:, None]
    return times_s


def _check_rounds(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on rounds in which all ranks take equally long, so that only rounds matter."""
    _compare(subject, [(np.repeat(rounds_of(rng, n, 1), P, axis=1), 0) for n, P in ((5, 1), (7, 3))])


def _check_ranks(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on rounds that each have another slowest rank."""
    turns = np.array([[1.0, 1.2, 2.0], [1.1, 2.1, 1.3], [2.2, 1.4, 1.05]]) * rng.uniform(0.5, 2.0)
    _compare(subject, [(turns, 0), (rounds_of(rng, 5, 4), 0)])


def _check_warmup(subject: Any, rng: np.random.Generator) -> None:
    quick = rounds_of(rng, 7, 2, warmup=2)
    quick[:2] = 0.5 + 0.1 * rng.random((2, 2))  # rounds to warm up do not count even if they are quick
    _compare(subject, [(rounds_of(rng, 6, 2, warmup=3), 3), (rounds_of(rng, 9, 2, warmup=2), 2), (quick, 2)])


def _check_even(subject: Any, rng: np.random.Generator) -> None:
    _compare(subject, [(rounds_of(rng, n, P, warmup=w), w) for n, P, w in ((4, 2, 0), (11, 8, 1))])


STAGE = Stage(
    id="13.seconds",
    function="seconds",
    title="Honest seconds",
    hints=(
        "A round has one time per rank. When is the result of that round complete? And which round is typical?",
        "Leave out the first rounds. Reduce each round to one time first, then the rounds to one. The order matters.",
        r"$T = \operatorname{median}_{i \ge \mathrm{warmup}}\ \max_r\, t_{i,r}$",
    ),
    misconceptions=misconceptions_of("13.seconds"),
    checks=(
        Check("rounds", 1, "visible", "one round was disturbed", _check_rounds),
        Check("ranks", 1, "visible", "ranks that differ", _check_ranks),
        Check("warmup", 1, "visible", "rounds to warm up", _check_warmup),
        Check("even", 1, "held-out", "an even number of rounds; eight ranks", _check_even),
    ),
)  # fmt: skip
