"""Checks of 08.balance: the work of each step's busiest rank, added up and divided by the ideal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.errors import apart
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.growth import measured
from ringlab_course.checking.positions import Question, judge
from ringlab_course.checking.wrong_answers import misconceptions_of
from ringlab_course.exercises.e08_striped_and_zigzag.deal import dealt
from ringlab_course.exercises.e08_striped_and_zigzag.tiles import LARGE, Tile, counts

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

NEAR = 1e-9
"""The largest relative error of an answer that counts as right."""


def imbalance(positions: Sequence[np.ndarray], tile: Tile) -> float:
    """Return the score elements of each step's busiest rank, added up and divided by the ideal."""
    P, S = len(positions), sum(map(len, positions))
    tiles = [
        max(sum(counts(positions[r], positions[(r - step) % P], tile)[:2]) for r in range(P))
        for step in range(P)
    ]
    return sum(tiles) * tile[0] * tile[1] / (S * (S + 1) / 2 / P)


def _verify(subject: Subject, cases: Sequence[tuple[Any, ...]]) -> None:
    """Check answers to cases (name, positions, tile), or (name, positions, tile, answer) if the call was made already."""

    def ask(name: str, positions: list[np.ndarray], tile: Tile, answer: Any = None) -> Question:
        truth = imbalance(positions, tile)
        got = _expect_number(subject.call(positions, tile) if answer is None else answer)
        case = f"{name}, S={sum(map(len, positions))}, P={len(positions)}, tile {tile}"
        found, right = apart(got, truth, digits=4, kind="f")
        return Question((positions, tile), got, truth, f"{case}: got {found}, expected {right}")

    judge(cases, ask, _near, _failure, _expect_number)


def _failure(wrong: Question) -> Failure:
    return Failure(
        "The imbalance is another number. It is made of tile_counts: if 08.tiles is not right yet, mend that first. Then print "
        "full + masked of every rank in every step, and compare with what you expect.",
        wrong.example,
    )


def _expect_number(answer: Any) -> float:
    if answer is None:
        raise Failure("the result is None: is the `return` missing?")
    try:
        return float(answer)
    except (TypeError, ValueError, OverflowError):
        raise Failure(f"the result should be one number, but is a {type(answer).__name__}.") from None


def _near(a: float, b: float) -> bool:
    return bool(np.isclose(a, b, rtol=NEAR, atol=0, equal_nan=True))


def _family(S: int, P: int) -> tuple[tuple[str, list[np.ndarray]], ...]:
    """Return five layouts of S tokens with their names. The last one is even in total, but not in each step."""
    L = -(-S // P)
    return (
        ("zig-zag", dealt(S, P, -(-L // 2), True)),
        ("striped", dealt(S, P, 1, False)),
        ("token fold", dealt(S, P, 1, True)),
        ("contiguous", dealt(S, P, L, False)),
        ("stretches of equal work", np.split(np.arange(S), [round(S * (r / P) ** 0.5) for r in range(1, P)])),
    )


def _families(*sizes: tuple[int, int, Tile]) -> list[tuple[Any, ...]]:
    return [(name, positions, tile) for S, P, tile in sizes for name, positions in _family(S, P)]


def _check_tokens(subject: Subject, rng: np.random.Generator) -> None:
    """Check answers for tiles of one token, where the work is the number of visible pairs."""
    sizes = [(P * int(rng.integers(6, 60)) + int(rng.integers(P)), P) for P in (2, 3, 4, 5)]
    alone = ("one rank", dealt(int(rng.integers(20, 400)), 1, 1, False), (1, 1))
    _verify(subject, [*_families(*((S, P, (1, 1)) for S, P in sizes)), alone])


def _check_tiles(subject: Subject, rng: np.random.Generator) -> None:
    """Check answers for larger tiles. Some divide the shards, and some do not."""
    sizes: list[tuple[int, int, Tile]] = []
    for P, most in ((2, 3), (3, 4), (4, 5), (8, 3)):
        rows, columns = int(rng.integers(2, most + 1)), int(rng.integers(2, most + 1))
        sizes.append((2 * P * rows * columns * int(rng.integers(2, 12)), P, (rows, columns)))
    sizes.append((int(rng.integers(30, 120)) * 3 + 1, 3, _any_tile(rng, 5)))
    _verify(subject, _families(*sizes))


def _check_uneven(subject: Subject, rng: np.random.Generator) -> None:
    """Check answers for lengths that tiles and ranks do not divide, and for more ranks than tokens."""
    sizes = [(int(rng.integers(10 * P, 40 * P)), P, _any_tile(rng, 5)) for P in (2, 3, 5, 8)]
    _verify(subject, [*_families(*sizes), *_families((int(rng.integers(4, 8)), 8, _any_tile(rng, 40)))])


def _any_tile(rng: np.random.Generator, most: int) -> Tile:
    return int(rng.integers(2, most + 1)), int(rng.integers(2, most + 1))


def _check_memory(subject: Subject, rng: np.random.Generator) -> None:
    cases: list[tuple[Any, ...]] = []

    def peak(n: int) -> int:
        positions = dealt(2 * n + int(rng.integers(64)), 2, int(rng.integers(1, 8)), False)
        called = subject.measure(positions, (64, 64))
        cases.append(("round-robin", positions, (64, 64), called.answer))
        return called.peak_bytes

    growth = measured(LARGE, peak, 1, LARGE[-1] ** 2)
    if growth.faster_than(1, LARGE[-1] ** 2):
        raise STAGE.misconception("compares_all_pairs").failure(
            f"two ranks with S tokens each, tile (64, 64); {growth}"
        )
    _verify(subject, cases)


STAGE = Stage(
    id="08.balance",
    function="imbalance",
    title="The busiest rank of every step",
    helpers=("tile_counts",),
    hints=(
        "If all ranks wait for all in every step, which rank decides how long step t takes? Can a rank that was early in one "
        "step use that time in the next?",
        "For each step, count with tile_counts what every rank r computes against the block of rank (r − t) mod P, and keep "
        "the maximum. Add up these maxima. Divide by the visible pairs that one rank would compute in an even split.",
        r"$\dfrac{\sum_t \max_r\,(\mathrm{full} + \mathrm{masked})_{r,t} \cdot \mathrm{rows} \cdot \mathrm{keys}}"
        r"{S (S+1) / 2 / P}$",
    ),
    misconceptions=misconceptions_of("08.balance"),
    checks=(
        Check("tokens", 2, "visible", "tiles of one token: the busiest rank of each step", _check_tokens),
        Check("tiles", 2, "visible", "larger tiles: whole tiles are computed", _check_tiles),
        Check("uneven", 2, "held-out", "lengths that do not divide", _check_uneven),
        Check(
            "memory",
            1,
            "stress",
            "long shards, without a mask of all pairs",
            _check_memory,
            kind="cost",
        ),
    ),
)
