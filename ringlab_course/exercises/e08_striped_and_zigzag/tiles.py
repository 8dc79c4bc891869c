"""Checks of 08.tiles and 08.balance: what a kernel computes of a pair of shards, and how long the busiest rank takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.errors import apart
from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.growth import measured
from ringlab_course.checking.positions import Question, judge, listed, mistake_in
from ringlab_course.exercises.e08_striped_and_zigzag.deal import dealt
from ringlab_course.exercises.e08_striped_and_zigzag.tile_mistakes import (
    BALANCE,
    KINDS,
    TILES,
    Counts,
    Tile,
    counts,
    imbalance,
)

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

NEAR = 1e-9
LARGE = 1024, 2048, 4096


def _judge_counts(subject: Subject, cases: Sequence[tuple[Any, ...]]) -> None:
    """Judge cases (queries, keys, tile), or with the answer as a fourth where it is there already."""

    def ask(queries: Any, keys: Any, tile: Tile, answer: Any = None) -> Question:
        queries, keys = np.array(queries, dtype=np.int64), np.array(keys, dtype=np.int64)
        truth = counts(queries, keys, tile)
        got = _expect_counts(subject.call(queries, keys, tile) if answer is None else answer)
        case = f"queries at {listed(queries)}, keys at {listed(keys)}, tile {tile}"
        return Question(
            (queries, keys, tile), got, truth, f"{case}: got {_told(got)}; expected {_told(truth)}"
        )

    judge(cases, ask, lambda a, b: a == b, _explain_counts)


def _explain_counts(answered: list[Question], wrong: Question) -> Failure:
    if mistake := mistake_in(answered, TILES, lambda a, b: a == b):
        return mistake.failure(wrong.example)
    if sum(wrong.got) != sum(wrong.truth):
        return Failure(
            "The three numbers do not add up to the number of tiles, ⌈queries / rows⌉ · ⌈keys / columns⌉.",
            wrong.example,
        )
    return Failure("The tiles are sorted into the wrong kinds.", wrong.example)


def _expect_counts(answer: Any) -> Counts:
    if isinstance(answer, np.ndarray) and answer.shape == (len(KINDS),):
        answer = answer.tolist()
    parts = expect_tuple(answer, KINDS)
    try:
        numbers = tuple(int(part) for part in parts)
    except (TypeError, ValueError, OverflowError):
        raise Failure(f"the result should be three integers ({', '.join(KINDS)}).") from None
    return numbers[0], numbers[1], numbers[2]


def _told(numbers: Counts) -> str:
    return ", ".join(f"{n} {name}" for n, name in zip(numbers, KINDS, strict=True))


Asked = tuple[np.ndarray, np.ndarray, Tile]


def _later(rng: np.random.Generator, cases: Sequence[tuple[list[int], list[int], Tile]]) -> list[Asked]:
    """Return the cases as parts of a longer sequence: all positions of a case are later by the same number."""
    begins = rng.integers(1, 10_000, len(cases)).tolist()
    return [
        (np.array(queries, np.int64) + begin, np.array(keys, np.int64) + begin, tile)
        for begin, (queries, keys, tile) in zip(begins, cases, strict=True)
    ]


def _any_shards(rng: np.random.Generator, times: int, in_order: bool) -> list[Asked]:
    """Return shards of up to 12 positions that interleave, ascending or in any order, and any small tile."""
    cases = []
    for _ in range(times):
        q, k = (rng.choice(40, int(rng.integers(4, 13)), replace=False) for _ in range(2))
        if in_order:
            q, k = np.sort(q), np.sort(k)
        tile = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        cases.append((q.astype(np.int64), k.astype(np.int64), tile))
    return cases


def _check_ascending(subject: Subject, rng: np.random.Generator) -> None:
    cases: tuple[tuple[list[int], list[int], Tile], ...] = (
        ([4, 5], [0, 1], (1, 1)),
        ([0, 1], [0, 1], (1, 1)),
        ([1, 2, 3, 4], [2, 3], (4, 1)),
        ([0, 1], [4, 5], (1, 2)),
        ([2, 3, 4, 5], [0, 1, 2, 3], (2, 2)),
        ([0, 1, 2, 3], [0, 1, 2, 3], (2, 2)),
        ([1, 4, 7, 10], [2, 5, 8, 11], (2, 2)),
        ([0, 3, 6, 9], [2, 5, 8, 11], (2, 1)),
        ([4, 5, 6, 7], [3, 4], (2, 2)),
        ([2, 3, 4], [4, 5], (3, 2)),
        ([0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11], (4, 2)),
    )
    _judge_counts(subject, [*_later(rng, cases), *_any_shards(rng, 3, in_order=True)])


def _check_seams(subject: Subject, rng: np.random.Generator) -> None:
    cases: tuple[tuple[list[int], list[int], Tile], ...] = (
        ([0, 8, 7, 15], [1, 9, 6, 14], (4, 4)),
        ([0, 8, 16, 7, 15, 23], [3, 11, 19, 4, 12, 20], (3, 2)),
        ([0, 8, 16, 7, 15, 23], [3, 11, 19, 4, 12, 20], (2, 2)),
        ([0, 8, 16, 24, 7, 15, 23, 31], [2, 10, 18, 26, 5, 13, 21, 29], (3, 3)),
    )
    _judge_counts(subject, [*_later(rng, cases), *_any_shards(rng, 3, in_order=False)])


def _check_edges(subject: Subject, rng: np.random.Generator) -> None:
    cases: tuple[tuple[list[int], list[int], Tile], ...] = (
        ([0, 1, 2], [0, 1, 2], (2, 2)),
        ([3, 4, 5], [0, 1], (2, 4)),
        ([1, 3, 5, 7, 9], [0, 2, 4, 6], (2, 3)),
        ([], [0, 1], (2, 2)),
        ([5], [], (2, 2)),
    )
    _judge_counts(subject, [*_later(rng, cases), *_any_shards(rng, 3, in_order=True)])


def _check_any_shards(subject: Subject, rng: np.random.Generator) -> None:
    cases = []
    for P in (2, 3, 8):
        for folded in (False, True):
            S, chunk = int(rng.integers(60, 400)), int(rng.integers(1, 12))
            shares = [mine + int(rng.integers(1000)) for mine in dealt(S, P, chunk, folded)]
            tile = (int(rng.integers(1, 9)), int(rng.integers(1, 9)))
            for origin in range(P):
                cases.append((rng.permutation(shares[1]), shares[origin], tile))
                cases.append((shares[P - 1], shares[origin], tile))
    _judge_counts(subject, cases)


def _check_tile_memory(subject: Subject, rng: np.random.Generator) -> None:
    def large(n: int, size: int) -> Asked:
        """Two stripes of n tokens, of which one is up to n tokens later."""
        begins = rng.integers(1, 4 * n, 2).tolist()
        queries, keys = (begin + np.arange(0, 4 * n, 4) for begin in begins)
        return queries, keys, (size, size)

    _judge_counts(subject, [large(16, 4)])
    cases: list[tuple[Any, ...]] = []

    def peak(n: int) -> int:
        asked = large(n, 64)
        called = subject.measure(*asked)
        cases.append((*asked, called.answer))
        return called.peak_bytes

    growth = measured(LARGE, peak, order=1)
    if growth.faster_than(1):
        raise TILES[-1].failure(f"shards of S tokens, tile (64, 64); {growth}")
    _judge_counts(subject, cases)


def _judge_imbalance(subject: Subject, cases: Sequence[tuple[Any, ...]]) -> None:
    """Judge cases (name, positions, tile), or with the answer as a fourth where it is there already."""

    def ask(name: str, positions: list[np.ndarray], tile: Tile, answer: Any = None) -> Question:
        truth = imbalance(positions, tile)
        got = _expect_number(subject.call(positions, tile) if answer is None else answer)
        case = f"{name}, S={sum(map(len, positions))}, P={len(positions)}, tile {tile}"
        found, right = apart(got, truth, digits=4, kind="f")
        return Question((positions, tile), got, truth, f"{case}: got {found}, expected {right}")

    judge(cases, ask, _near, _explain_imbalance)


def _explain_imbalance(answered: list[Question], wrong: Question) -> Failure:
    if mistake := mistake_in(answered, BALANCE, _near):
        return mistake.failure(wrong.example)
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
    """Return the four published layouts of S tokens, by name, and one with even totals and uneven steps."""
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
    """Tiles of one token, where work is the number of visible pairs."""
    sizes = [(P * int(rng.integers(6, 60)) + int(rng.integers(P)), P) for P in (2, 3, 4, 5)]
    alone = ("one rank", dealt(int(rng.integers(20, 400)), 1, 1, False), (1, 1))
    _judge_imbalance(subject, [*_families(*((S, P, (1, 1)) for S, P in sizes)), alone])


def _check_tiles(subject: Subject, rng: np.random.Generator) -> None:
    """Larger tiles, which divide the shards, and some that do not."""
    sizes: list[tuple[int, int, Tile]] = []
    for P, most in ((2, 3), (3, 4), (4, 5), (8, 3)):
        rows, columns = int(rng.integers(2, most + 1)), int(rng.integers(2, most + 1))
        sizes.append((2 * P * rows * columns * int(rng.integers(2, 12)), P, (rows, columns)))
    sizes.append((int(rng.integers(30, 120)) * 3 + 1, 3, _any_tile(rng, 5)))
    _judge_imbalance(subject, _families(*sizes))


def _check_uneven(subject: Subject, rng: np.random.Generator) -> None:
    """Lengths that do not divide, and more ranks than tokens."""
    sizes = [(int(rng.integers(10 * P, 40 * P)), P, _any_tile(rng, 5)) for P in (2, 3, 5, 8)]
    _judge_imbalance(
        subject, [*_families(*sizes), *_families((int(rng.integers(4, 8)), 8, _any_tile(rng, 40)))]
    )


def _any_tile(rng: np.random.Generator, most: int) -> Tile:
    return int(rng.integers(2, most + 1)), int(rng.integers(2, most + 1))


def _check_balance_memory(subject: Subject, rng: np.random.Generator) -> None:
    cases: list[tuple[Any, ...]] = []

    def peak(n: int) -> int:
        positions = dealt(2 * n + int(rng.integers(64)), 2, int(rng.integers(1, 8)), False)
        called = subject.measure(positions, (64, 64))
        cases.append(("round-robin", positions, (64, 64), called.answer))
        return called.peak_bytes

    growth = measured(LARGE, peak, order=1)
    if growth.faster_than(1):
        raise BALANCE[-1].failure(f"two ranks with S tokens each, tile (64, 64); {growth}")
    _judge_imbalance(subject, cases)


TILES_STAGE = Stage(
    id="08.tiles",
    function="tile_counts",
    title="Tiles that are full, masked, skipped",
    hints=(
        "Which of a tile's queries decides whether the tile may be skipped, and which of its keys?",
        "For every group of queries take the earliest and the latest, and the same for every group of keys "
        "(np.minimum.reduceat and np.maximum.reduceat at 0, size, 2·size, …). Compare these by broadcasting.",
        r"skipped: $\max_i q_i < \min_j k_j$; full: $\min_i q_i \ge \max_j k_j$; masked: neither",
    ),
    misconceptions=TILES,
    checks=(
        Check("ascending", 2, "visible", "shards in ascending order", _check_ascending),
        Check("seams", 2, "visible", "shards whose positions do not ascend", _check_seams),
        Check("edges", 2, "visible", "short tiles, empty shards", _check_edges),
        Check("any", 1, "held-out", "any shards, any tile", _check_any_shards),
        Check(
            "memory",
            1,
            "visible",
            "long shards, without a mask of all pairs",
            _check_tile_memory,
            kind="cost",
        ),
    ),
)

BALANCE_STAGE = Stage(
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
    misconceptions=BALANCE,
    checks=(
        Check("tokens", 2, "visible", "tiles of one token: the busiest rank of each step", _check_tokens),
        Check("tiles", 2, "visible", "larger tiles: whole tiles are computed", _check_tiles),
        Check("uneven", 2, "held-out", "lengths that do not divide", _check_uneven),
        Check(
            "memory",
            1,
            "stress",
            "long shards, without a mask of all pairs",
            _check_balance_memory,
            kind="cost",
        ),
    ),
)
