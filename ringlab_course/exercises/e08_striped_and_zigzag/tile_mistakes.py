"""Exercise 08: common mistakes in counting tiles and in measuring balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np

from ringlab_course.checking.wrong_answers import mistakes_of

balance_mistake = mistakes_of("08.balance")
tiles_mistake = mistakes_of("08.tiles")

Counts = tuple[int, int, int]
Tile = tuple[int, int]
KINDS = ("full", "masked", "skipped")


def ends(positions: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest position of every `size` tokens."""
    if len(positions) == 0:
        return positions, positions
    starts = np.arange(0, len(positions), size)
    return np.minimum.reduceat(positions, starts), np.maximum.reduceat(positions, starts)


def counts(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> Counts:
    """Return the numbers of full, masked and skipped tiles."""
    (q_low, q_high), (k_low, k_high) = ends(queries, tile[0]), ends(keys, tile[1])
    return _sorted_out(q_high[:, None] >= k_low, q_low[:, None] >= k_high)


def _sorted_out(some: np.ndarray, full: np.ndarray) -> Counts:
    return int((some & full).sum()), int((some & ~full).sum()), int((~some).sum())


def _by_index(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> Counts:
    return counts(np.arange(len(queries)), np.arange(len(keys)), tile)


def _corners(which_first: str) -> Callable[[np.ndarray, np.ndarray, Tile], Counts]:
    """Return counts by the first and the last token of a group, where a tile may be both full and skipped."""

    def corner(positions: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        return positions[::size], np.append(positions[size - 1 : -1 : size], positions[-1:])

    def imitate(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> Counts:
        (q_first, q_last), (k_first, k_last) = corner(queries, tile[0]), corner(keys, tile[1])
        some, full = q_last[:, None] >= k_first, q_first[:, None] >= k_last
        return _by_order(some, full, which_first)

    return imitate


def _by_order(some: np.ndarray, full: np.ndarray, which_first: str) -> Counts:
    """Return counts where a tile that is full, but shows nothing, counts as what is asked first, or as both."""
    if which_first == "skip":
        return _sorted_out(some, full)
    if which_first == "full":
        return _sorted_out(some | full, full)
    return int(full.sum()), int(some.size - full.sum() - (~some).sum()), int((~some).sum())


def _strictly(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> Counts:
    (q_low, q_high), (k_low, k_high) = ends(queries, tile[0]), ends(keys, tile[1])
    return _sorted_out(q_high[:, None] > k_low, q_low[:, None] > k_high)


def _full_too_rarely(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> Counts:
    (q_low, q_high), (k_low, k_high) = ends(queries, tile[0]), ends(keys, tile[1])
    return _sorted_out(q_high[:, None] >= k_low, q_low[:, None] > k_high)


def _skips_too_much(which_first: str) -> Callable[[np.ndarray, np.ndarray, Tile], Counts]:
    """Return counts that skip a tile with one visible pair; a tile of one pair is full as well, and counts as asked."""

    def imitate(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> Counts:
        (q_low, q_high), (k_low, k_high) = ends(queries, tile[0]), ends(keys, tile[1])
        return _by_order(q_high[:, None] > k_low, q_low[:, None] >= k_high, which_first)

    return imitate


def _reordered(order: tuple[int, ...]) -> Callable[[np.ndarray, np.ndarray, Tile], Counts]:
    def imitate(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> Counts:
        right = counts(queries, keys, tile)
        return right[order[0]], right[order[1]], right[order[2]]

    return imitate


def _whole_tiles(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> Counts:
    n, m = len(queries) // tile[0] * tile[0], len(keys) // tile[1] * tile[1]
    return counts(queries[:n], keys[:m], tile)


def _first_row(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> Counts:
    (q_low, _), (k_low, k_high) = ends(queries, tile[0]), ends(keys, tile[1])
    return _sorted_out(q_low[:, None] >= k_low, q_low[:, None] >= k_high)


def _pairs(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> Counts:
    return counts(queries, keys, (1, 1))


def _masked_is_full(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> Counts:
    full, masked, skipped = counts(queries, keys, tile)
    return full + masked, 0, skipped


ORDERS = (("", "skip"), ("_after_full", "full"), ("_by_difference", "neither"))
OTHER_ORDER = tiles_mistake("order_skipped_masked_full")
TILES = (
    tiles_mistake("sorts_first", lambda queries, keys, tile: counts(np.sort(queries), np.sort(keys), tile)),
    tiles_mistake("compares_indices", _by_index),
    *(
        replace(
            tiles_mistake("assumes_ascending"),
            name=f"assumes_ascending{suffix}",
            imitate=_corners(which_first),
        )
        for suffix, which_first in ORDERS
    ),
    tiles_mistake("strictly_before", _strictly),
    *(
        replace(
            tiles_mistake("skips_too_much"),
            name=f"skips_too_much{suffix}",
            imitate=_skips_too_much(which_first),
        )
        for suffix, which_first in ORDERS
    ),
    tiles_mistake("full_too_rarely", _full_too_rarely),
    *(
        replace(
            OTHER_ORDER,
            name=f"order_{'_'.join(KINDS[i] for i in order)}",
            message=OTHER_ORDER.message.format(order=", ".join(KINDS[i] for i in order)),
            imitate=_reordered(order),
        )
        for order in permutations(range(3))
        if order != (0, 1, 2)
    ),
    tiles_mistake("drops_the_edge", _whole_tiles),
    tiles_mistake(
        "swaps_rows_and_keys", lambda queries, keys, tile: counts(queries, keys, (tile[1], tile[0]))
    ),
    tiles_mistake("looks_at_the_first_row", _first_row),
    tiles_mistake("masked_counted_as_full", _masked_is_full),
    tiles_mistake("counts_pairs", _pairs),
    tiles_mistake("compares_all_pairs"),
)

Shards = Sequence[np.ndarray]
Work = Callable[[np.ndarray, np.ndarray, Tile], float]


def computed(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> float:
    """Return the score elements that a kernel computes: every tile that is not skipped counts wholly."""
    full, masked, _ = counts(queries, keys, tile)
    return (full + masked) * tile[0] * tile[1]


def table(positions: Shards, tile: Tile, work: Work = computed) -> np.ndarray:
    """Return the work of every rank (rows) in every step (columns)."""
    P = len(positions)
    return np.array(
        [[work(positions[r], positions[(r - t) % P], tile) for t in range(P)] for r in range(P)], dtype=float
    )


def ideal(positions: Shards) -> float:
    """Return the visible pairs of the whole sequence, divided among the ranks."""
    S = sum(map(len, positions))
    return S * (S + 1) / 2 / len(positions)


def imbalance(positions: Shards, tile: Tile) -> float:
    """Return the sum over steps of the busiest rank's work, over the ideal."""
    return table(positions, tile).max(0).sum() / ideal(positions)


def _half_masked(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> float:
    full, masked, _ = counts(queries, keys, tile)
    return (full + masked / 2) * tile[0] * tile[1]


def _nothing_skipped(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> float:
    return sum(counts(queries, keys, tile)) * tile[0] * tile[1]


def _only_full(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> float:
    return counts(queries, keys, tile)[0] * tile[0] * tile[1]


def _short_tiles_short(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> float:
    (_, q_high), (k_low, _) = ends(queries, tile[0]), ends(keys, tile[1])
    rows = np.minimum(tile[0], len(queries) - np.arange(0, len(queries), tile[0]))
    columns = np.minimum(tile[1], len(keys) - np.arange(0, len(keys), tile[1]))
    return float((rows[:, None] * columns)[q_high[:, None] >= k_low].sum())


def _by_origin(positions: Shards, tile: Tile) -> float:
    work = table(positions, tile)
    P = len(positions)
    return sum(max(work[r, (r - origin) % P] for r in range(P)) for origin in range(P)) / ideal(positions)


def _mean_of_ratios(positions: Shards, tile: Tile) -> float:
    work = table(positions, tile)
    with np.errstate(invalid="ignore"):  # a step in which nobody works
        return float(np.mean(work.max(0) / work.mean(0)))


def _equal_lengths(positions: Shards, tile: Tile) -> float:
    S = len(positions) * len(positions[0])
    return imbalance(positions, tile) * ideal(positions) / (S * (S + 1) / 2 / len(positions))


def _with_counts(miscount: Callable[..., Counts]) -> Callable[[Shards, Tile], float]:
    """Return the imbalance that comes out of wrong tile counts."""

    def work(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> float:
        full, masked, _ = miscount(queries, keys, tile)
        return (full + masked) * tile[0] * tile[1]

    return lambda positions, tile: table(positions, tile, work).max(0).sum() / ideal(positions)


BALANCE = (
    balance_mistake(
        "total_of_a_rank", lambda positions, tile: table(positions, tile).sum(1).max() / ideal(positions)
    ),
    balance_mistake(
        "mean_of_the_ranks", lambda positions, tile: table(positions, tile).mean(0).sum() / ideal(positions)
    ),
    balance_mistake(
        "waste_cancels",
        lambda positions, tile: table(positions, tile).max(0).sum() / table(positions, tile).mean(0).sum(),
    ),
    balance_mistake("token_granularity", lambda positions, tile: imbalance(positions, (1, 1))),
    balance_mistake("mean_of_the_ratios", _mean_of_ratios),
    balance_mistake(
        "half_the_square",
        lambda positions, tile: (
            imbalance(positions, tile) * ideal(positions) * 2 * len(positions) / sum(map(len, positions)) ** 2
        ),
    ),
    balance_mistake("ideal_of_one_rank", lambda positions, tile: imbalance(positions, tile) / len(positions)),
    balance_mistake(
        "half_a_masked_tile",
        lambda positions, tile: table(positions, tile, _half_masked).max(0).sum() / ideal(positions),
    ),
    balance_mistake(
        "skips_nothing",
        lambda positions, tile: table(positions, tile, _nothing_skipped).max(0).sum() / ideal(positions),
    ),
    balance_mistake(
        "full_tiles_only",
        lambda positions, tile: table(positions, tile, _only_full).max(0).sum() / ideal(positions),
    ),
    balance_mistake(
        "busiest_step_only",
        lambda positions, tile: table(positions, tile).max() * len(positions) / ideal(positions),
    ),
    balance_mistake(
        "busiest_step_of_every_rank",
        lambda positions, tile: table(positions, tile).max(1).sum() / ideal(positions),
    ),
    balance_mistake("by_origin", _by_origin),
    balance_mistake("counts_tiles", lambda positions, tile: imbalance(positions, tile) / (tile[0] * tile[1])),
    balance_mistake(
        "ideal_unmasked",
        lambda positions, tile: (
            imbalance(positions, tile) * ideal(positions) * len(positions) / sum(map(len, positions)) ** 2
        ),
    ),
    balance_mistake("assumes_equal_lengths", _equal_lengths),
    balance_mistake(
        "short_tiles_short",
        lambda positions, tile: table(positions, tile, _short_tiles_short).max(0).sum() / ideal(positions),
    ),
    *(
        replace(
            mistake,
            name=f"tiles_{mistake.name}",
            message="This number comes out where steps and ranks are right and tile_counts is wrong: mend 08.tiles first. "
            f"What seems to be wrong there: {mistake.message}",
            imitate=_with_counts(mistake.imitate),
        )
        for mistake in TILES
        if mistake.imitate is not None
    ),
    balance_mistake("compares_all_pairs"),
)
