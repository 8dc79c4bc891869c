"""Exercise 08: common mistakes in counting tiles and in measuring balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np

from ringlab.course.contract import Misconception

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


def _corners(queries: np.ndarray, keys: np.ndarray, tile: Tile) -> Counts:
    def corner(positions: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        return positions[::size], np.append(positions[size - 1 : -1 : size], positions[-1:])

    (q_first, q_last), (k_first, k_last) = corner(queries, tile[0]), corner(keys, tile[1])
    return _sorted_out(q_last[:, None] >= k_first, q_first[:, None] >= k_last)


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
        some, full = q_high[:, None] > k_low, q_low[:, None] >= k_high
        if which_first == "skip":
            return _sorted_out(some, full)
        if which_first == "full":
            return _sorted_out(some | full, full)
        return int(full.sum()), int(some.size - full.sum() - (~some).sum()), int((~some).sum())

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


TILES = (
    Misconception(
        "sorts_first",
        "You sort the positions before you cut them into tiles. A kernel cuts a shard as it lies in memory, run after run; "
        "sorted, the tiles are others.",
        lambda queries, keys, tile: counts(np.sort(queries), np.sort(keys), tile),
    ),
    Misconception(
        "compares_indices",
        "You compare places in the two shards, not positions in the text: every pair of shards gets the same triangle. Row 0 "
        "of a shard is not token 0. Look at the positions that you are given.",
        _by_index,
    ),
    Misconception(
        "assumes_ascending",
        "You take the last row of a tile for its latest query and the first key for its earliest. That holds only where "
        "positions ascend; a shard kept run after run steps back at the seam. Take the maximum and the minimum.",
        _corners,
    ),
    Misconception(
        "strictly_before",
        "A query sees the key at its own position too. A tile in which that is the only visible pair is not skipped, and "
        "one whose last key has the first query's position is full.",
        _strictly,
    ),
    *(
        Misconception(
            f"skips_too_much{suffix}",
            "You skip a tile in which the latest query stands at the earliest key. A query sees the key at its own position: "
            "that one pair is visible, so the tile is computed. Skip only where the latest query comes before the earliest key.",
            _skips_too_much(which_first),
        )
        for suffix, which_first in (("", "skip"), ("_after_full", "full"), ("_by_difference", "neither"))
    ),
    Misconception(
        "full_too_rarely",
        "You call a tile masked in which the earliest query stands at the latest key. A query sees the key at its own "
        "position, so all of that tile is visible: it is full.",
        _full_too_rarely,
    ),
    *(
        Misconception(
            f"order_{'_'.join(KINDS[i] for i in order)}",
            f"These are the right numbers in another order: you return ({', '.join(KINDS[i] for i in order)}), "
            "asked is (full, masked, skipped).",
            _reordered(order),
        )
        for order in permutations(range(3))
        if order != (0, 1, 2)
    ),
    Misconception(
        "drops_the_edge",
        "Tiles at the edge are missing: where the length does not divide there is one shorter tile more, and a kernel runs "
        "that too. Count ⌈length / size⌉ of them.",
        _whole_tiles,
    ),
    Misconception(
        "swaps_rows_and_keys",
        "tile is (queries, keys); you cut the queries by the second number and the keys by the first.",
        lambda queries, keys, tile: counts(queries, keys, (tile[1], tile[0])),
    ),
    Misconception(
        "looks_at_the_first_row",
        "You skip a tile when its first query sees none of its keys. Later queries of the tile may see some: it can be "
        "skipped only where the latest query is before the earliest key.",
        _first_row,
    ),
    Misconception(
        "masked_counted_as_full",
        "You count every tile with a visible pair as full. A tile is full only where the earliest query sees the latest key; "
        "in all others the kernel has to apply a mask.",
        _masked_is_full,
    ),
    Misconception(
        "counts_pairs",
        "You count pairs of tokens, not tiles. A kernel computes a tile or leaves it out: one visible pair makes it a whole one.",
        _pairs,
    ),
    Misconception(
        "compares_all_pairs",
        "You build a mask of all queries times all keys. It grows with the square of the shard; for 131,072 tokens on each "
        "side it takes 17 GB. Two numbers for each tile are enough: its earliest and its latest position.",
    ),
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
    Misconception(
        "total_of_a_rank",
        "You add up every rank's steps first and take the maximum at the end. Ranks wait for each other in every step, so "
        "who is late in one step cannot make up for it in another: maximum in each step, then the sum.",
        lambda positions, tile: table(positions, tile).sum(1).max() / ideal(positions),
    ),
    Misconception(
        "mean_of_the_ranks",
        "You take the mean over ranks of each step. The others wait for the slowest rank: it is the maximum that takes time.",
        lambda positions, tile: table(positions, tile).mean(0).sum() / ideal(positions),
    ),
    Misconception(
        "waste_cancels",
        "You divide by the mean of what the ranks computed. So the masked halves of tiles, which all ranks compute alike, "
        "cancel: everybody is equally late. The ideal holds visible pairs only, S (S + 1) / 2 / P.",
        lambda positions, tile: table(positions, tile).max(0).sum() / table(positions, tile).mean(0).sum(),
    ),
    Misconception(
        "token_granularity",
        "You count visible pairs, whatever the tile. A kernel computes a tile wholly if one pair in it is visible; by tokens "
        "striping looks better than it runs.",
        lambda positions, tile: imbalance(positions, (1, 1)),
    ),
    Misconception(
        "mean_of_the_ratios",
        "You take maximum over mean in each step and average these ratios over steps. A step in which hardly anybody works "
        "then weighs as much as a full one. Add up the maxima, and divide once.",
        _mean_of_ratios,
    ),
    Misconception(
        "half_the_square",
        "The ideal is not S²/2 but S (S + 1) / 2: a query sees itself too.",
        lambda positions, tile: (
            imbalance(positions, tile) * ideal(positions) * 2 * len(positions) / sum(map(len, positions)) ** 2
        ),
    ),
    Misconception(
        "ideal_of_one_rank",
        "The ideal is one rank's share: divide the visible pairs by P.",
        lambda positions, tile: imbalance(positions, tile) / len(positions),
    ),
    Misconception(
        "half_a_masked_tile",
        "You count a masked tile as half a tile. Half its scores may be hidden, but the kernel computes all of them and "
        "hides them afterwards.",
        lambda positions, tile: table(positions, tile, _half_masked).max(0).sum() / ideal(positions),
    ),
    Misconception(
        "skips_nothing",
        "You count the skipped tiles as well: tiles that nobody sees are not computed.",
        lambda positions, tile: table(positions, tile, _nothing_skipped).max(0).sum() / ideal(positions),
    ),
    Misconception(
        "full_tiles_only",
        "You count the full tiles only; masked ones are computed too.",
        lambda positions, tile: table(positions, tile, _only_full).max(0).sum() / ideal(positions),
    ),
    Misconception(
        "busiest_step_only",
        "You look at the busiest step only. The run takes as long as all steps together.",
        lambda positions, tile: table(positions, tile).max() * len(positions) / ideal(positions),
    ),
    Misconception(
        "busiest_step_of_every_rank",
        "You take the busiest step of every rank and add these up over ranks. Turn it round: in each step the busiest rank, "
        "and the sum over steps.",
        lambda positions, tile: table(positions, tile).max(1).sum() / ideal(positions),
    ),
    Misconception(
        "by_origin",
        "You take the maximum over ranks for every block, not for every step. The ranks meet the same block in different "
        "steps: in step t rank r meets that of rank (r − t) mod P, and it is in a step that they wait for each other.",
        _by_origin,
    ),
    Misconception(
        "counts_tiles",
        "You count tiles where the ideal counts score elements. Multiply by tile[0] · tile[1].",
        lambda positions, tile: imbalance(positions, tile) / (tile[0] * tile[1]),
    ),
    Misconception(
        "ideal_unmasked",
        "Your ideal is S² / P, as if every query saw every key. Half of them are hidden: S (S + 1) / 2 / P.",
        lambda positions, tile: (
            imbalance(positions, tile) * ideal(positions) * len(positions) / sum(map(len, positions)) ** 2
        ),
    ),
    Misconception(
        "assumes_equal_lengths",
        "Your S is P times the length of the first shard. Shards need not be equally long: S is the sum of their lengths.",
        _equal_lengths,
    ),
    Misconception(
        "short_tiles_short",
        "You count a short tile at the edge with as many scores as it has. The kernel runs it like any other: it counts "
        "tile[0] · tile[1] as well.",
        lambda positions, tile: table(positions, tile, _short_tiles_short).max(0).sum() / ideal(positions),
    ),
    *(
        Misconception(
            f"tiles_{mistake.name}",
            "This number comes out where steps and ranks are right and tile_counts is wrong: mend 08.tiles first. "
            f"What seems to be wrong there: {mistake.message}",
            _with_counts(mistake.imitate),
        )
        for mistake in TILES
        if mistake.imitate is not None
    ),
    Misconception(
        "compares_all_pairs",
        "Somewhere you hold a mask of a shard's queries times another's keys: memory grows with the square of the shard. "
        "tile_counts needs two numbers for each tile.",
    ),
)
