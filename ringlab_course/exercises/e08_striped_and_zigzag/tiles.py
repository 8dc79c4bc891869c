"""Checks of 08.tiles: a function that counts the full, masked and skipped tiles of two shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.growth import measured
from ringlab_course.checking.positions import Question, judge, listed
from ringlab_course.checking.wrong_answers import misconceptions_of
from ringlab_course.exercises.e08_striped_and_zigzag.deal import dealt

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

Counts = tuple[int, int, int]
Tile = tuple[int, int]
KINDS = ("full", "masked", "skipped")
LARGE = 1024, 2048, 4096
"""Numbers of tokens in a shard at which memory is measured."""


def counts(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> Counts:
    """Return the numbers of full, masked and skipped tiles."""
    (q_low, q_high), (k_low, k_high) = _ends(queries, tile[0]), _ends(keys, tile[1])
    some, full = q_high[:, None] >= k_low, q_low[:, None] >= k_high
    return int(full.sum()), int((some & ~full).sum()), int((~some).sum())


def _ends(positions: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest position in every group of `size` tokens."""
    if len(positions) == 0:
        return positions, positions
    starts = np.arange(0, len(positions), size)
    return np.minimum.reduceat(positions, starts), np.maximum.reduceat(positions, starts)


def _verify(subject: Subject, cases: Sequence[tuple[Any, ...]]) -> None:
    """Check answers to cases (queries, keys, tile), or to (queries, keys, tile, answer) if the call was made already."""

    def ask(queries: Any, keys: Any, tile: Tile, answer: Any = None) -> Question:
        queries, keys = np.array(queries, dtype=np.int64), np.array(keys, dtype=np.int64)
        truth = counts(queries, keys, tile)
        got = _expect_counts(subject.call(queries, keys, tile) if answer is None else answer)
        case = f"queries at {listed(queries)}, keys at {listed(keys)}, tile {tile}"
        return Question(
            (queries, keys, tile), got, truth, f"{case}: got {_told(got)}; expected {_told(truth)}"
        )

    judge(cases, ask, lambda a, b: a == b, _failure, _expect_counts)


def _failure(wrong: Question) -> Failure:
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
"""The arguments queries, keys and tile."""


def _later(rng: np.random.Generator, cases: Sequence[tuple[list[int], list[int], Tile]]) -> list[Asked]:
    """Return the cases as parts of longer sequences: a random number is added to all positions of a case."""
    begins = rng.integers(1, 10_000, len(cases)).tolist()
    return [
        (np.array(queries, np.int64) + begin, np.array(keys, np.int64) + begin, tile)
        for begin, (queries, keys, tile) in zip(begins, cases, strict=True)
    ]


def _any_shards(rng: np.random.Generator, times: int, in_order: bool) -> list[Asked]:
    """Return pairs of random shards of 4 to 12 positions, sorted if `in_order`, each with a random small tile."""
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
    _verify(subject, [*_later(rng, cases), *_any_shards(rng, 3, in_order=True)])


def _check_seams(subject: Subject, rng: np.random.Generator) -> None:
    cases: tuple[tuple[list[int], list[int], Tile], ...] = (
        ([0, 8, 7, 15], [1, 9, 6, 14], (4, 4)),
        ([0, 8, 16, 7, 15, 23], [3, 11, 19, 4, 12, 20], (3, 2)),
        ([0, 8, 16, 7, 15, 23], [3, 11, 19, 4, 12, 20], (2, 2)),
        ([0, 8, 16, 24, 7, 15, 23, 31], [2, 10, 18, 26, 5, 13, 21, 29], (3, 3)),
    )
    _verify(subject, [*_later(rng, cases), *_any_shards(rng, 3, in_order=False)])


def _check_edges(subject: Subject, rng: np.random.Generator) -> None:
    cases: tuple[tuple[list[int], list[int], Tile], ...] = (
        ([0, 1, 2], [0, 1, 2], (2, 2)),
        ([3, 4, 5], [0, 1], (2, 4)),
        ([1, 3, 5, 7, 9], [0, 2, 4, 6], (2, 3)),
        ([4, 5, 6, 7, 8], [3, 4], (2, 2)),
        ([2, 3, 4], [4, 5], (2, 2)),
        ([], [0, 1], (2, 2)),
        ([5], [], (2, 2)),
    )
    _verify(subject, [*_later(rng, cases), *_any_shards(rng, 3, in_order=True)])


def _check_any(subject: Subject, rng: np.random.Generator) -> None:
    cases = []
    for P in (2, 3, 8):
        for folded in (False, True):
            S, chunk = int(rng.integers(60, 400)), int(rng.integers(1, 12))
            shares = [mine + int(rng.integers(1000)) for mine in dealt(S, P, chunk, folded)]
            tile = (int(rng.integers(1, 9)), int(rng.integers(1, 9)))
            for origin in range(P):
                cases.append((rng.permutation(shares[1]), shares[origin], tile))
                cases.append((shares[P - 1], shares[origin], tile))
    _verify(subject, cases)


def _check_memory(subject: Subject, rng: np.random.Generator) -> None:
    def large(n: int, size: int) -> Asked:
        """Return two stripes of n tokens that begin at random positions, and a square tile of this size."""
        begins = rng.integers(1, 4 * n, 2).tolist()
        queries, keys = (begin + np.arange(0, 4 * n, 4) for begin in begins)
        return queries, keys, (size, size)

    _verify(subject, [large(16, 4)])
    cases: list[tuple[Any, ...]] = []

    def peak(n: int) -> int:
        asked = large(n, 64)
        called = subject.measure(*asked)
        cases.append((*asked, called.answer))
        return called.peak_bytes

    growth = measured(LARGE, peak, 1, LARGE[-1] ** 2)
    if growth.faster_than(1, LARGE[-1] ** 2):
        raise STAGE.misconception("compares_all_pairs").failure(
            f"shards of S tokens, tile (64, 64); {growth}"
        )
    _verify(subject, cases)


STAGE = Stage(
    id="08.tiles",
    function="tile_counts",
    title="Tiles that are full, masked, skipped",
    hints=(
        "Which of a tile's queries decides whether the tile may be skipped, and which of its keys?",
        "For every group of queries take the earliest and the latest, and the same for every group of keys "
        "(np.minimum.reduceat and np.maximum.reduceat at 0, size, 2·size, …). Compare these by broadcasting.",
        r"skipped: $\max_i q_i < \min_j k_j$; full: $\min_i q_i \ge \max_j k_j$; masked: neither",
    ),
    misconceptions=misconceptions_of("08.tiles"),
    checks=(
        Check("ascending", 2, "visible", "shards in ascending order", _check_ascending),
        Check("seams", 2, "visible", "shards whose positions do not ascend", _check_seams),
        Check("edges", 2, "visible", "short tiles, empty shards", _check_edges),
        Check("any", 1, "held-out", "any shards, any tile", _check_any),
        Check(
            "memory",
            1,
            "visible",
            "long shards, without a mask of all pairs",
            _check_memory,
            kind="cost",
        ),
    ),
)
