"""Checks of 07.relation: the tiles in which the queries of one run meet the keys of another.

Tiles are judged by the pairs that they cover: a table counts how often the tiles of an answer let each query
see each key. This table has to equal the causal mask of the two runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure, NotWritten
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of
from ringlab_course.exercises.e07_causal_imbalance.runs import Run

mistake = mistakes_of("07.relation")

Bounds = tuple[int, int, int, int, bool]
"""A tile: (q_start, q_stop, k_start, k_stop, causal)."""


def mask(q: Run, k: Run) -> np.ndarray:
    """Return 1.0 where the query's global position is at or after the key's: (n_q, n_k)."""
    rows, keys = (start + step * np.arange(length) for start, step, length in (q, k))
    return (rows[:, None] >= keys[None, :]).astype(np.float64)


def drawn(tiles: Iterable[Bounds], n_q: int, n_k: int) -> np.ndarray:
    """Return how often each (query, key) is seen in these tiles: (n_q, n_k)."""
    times = np.zeros((n_q, n_k))
    for q0, q1, k0, k1, causal in tiles:
        block = np.ones((q1 - q0, k1 - k0))
        times[q0:q1, k0:k1] += np.tril(block) if causal else block
    return times


def canonical(q: Run, k: Run) -> list[Bounds]:
    """Return the right tiles: none, a full one, or a triangle with the keys before it and rows after it."""
    (q_start, step, n_q), (k_start, _, n_k) = q, k
    shift = (q_start - k_start) // step  # row i sees the keys j ≤ i + shift
    if shift <= -n_q:
        return []
    if shift >= n_k - 1:
        return [(0, n_q, 0, n_k, False)]
    first, last = max(0, -shift), min(n_q, n_k - shift)
    tiles = [
        (first, last, first + shift, last + shift, True),
        (first, last, 0, shift, False),
        (last, n_q, 0, n_k, False),
    ]
    return [tile for tile in tiles if tile[1] > tile[0] and tile[3] > tile[2]]


MOST, MOST_READ = 3, 1000
"""The most tiles that two runs need (a triangle, the keys before it, the rows after it), and the most that a check reads."""


class Pair(NamedTuple):
    """A run of queries and a run of keys with the same step."""

    q: Run
    k: Run

    @property
    def text(self) -> str:
        """The two runs, as a counterexample names them."""
        return f"queries {self.q}, keys {self.k}"


LARGEST = Pair((0, 1, 16), (0, 1, 16))
"""Runs at least as long as those that `_verify` is called with."""


def read_tiles(answer: Any, pair: Pair) -> list[Bounds]:
    """Return the learner's tiles as numbers. Raises: Failure if they are not tiles of these runs."""
    if answer is None:
        raise Failure(
            "the result is None: is the `return` missing? If nothing is visible, return an empty list.",
            pair.text,
        )
    if not isinstance(answer, (list, tuple)):
        raise Failure(f"the result should be a list of tiles, but is a {type(answer).__name__}.", pair.text)
    if len(answer) > MOST_READ:
        raise mistake("row_by_row").failure(f"{pair.text}: {len(answer):,} tiles, {MOST} are enough")
    return [_read(tile, pair) for tile in answer]


def _read(tile: Any, pair: Pair) -> Bounds:
    if not isinstance(tile, (list, tuple)) or len(tile) != 5:
        got = f"{len(tile)} parts" if isinstance(tile, (list, tuple)) else f"a {type(tile).__name__}"
        raise Failure(
            "a tile should be (q_start, q_stop, k_start, k_stop, causal).", f"{pair.text}: a tile is {got}"
        )
    try:
        q0, q1, k0, k1 = (int(number) for number in tile[:4])
        exact = all(float(a) == float(b) for a, b in zip((q0, q1, k0, k1), tile[:4], strict=True))
        causal = bool(tile[4])
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact:
        raise Failure("a tile's bounds should be whole numbers, and `causal` True or False.", pair.text)
    if not (0 <= q0 <= q1 <= pair.q[2] and 0 <= k0 <= k1 <= pair.k[2]):
        raise Failure("a tile reaches beyond its runs.", f"{pair.text}: {(q0, q1, k0, k1)}")
    return q0, q1, k0, k1, causal


def _verify(subject: Any, pairs: Iterable[Pair]) -> None:
    """Compare the pairs that the tiles cover with the causal mask. The smallest runs come first."""
    twice: list[str] = []
    try:
        compare_all((_answered(subject, pair, twice) for pair in pairs), read=_covered)
    except Failure as failure:
        if type(failure) is Failure and failure.misconception is None and twice:
            raise mistake("covers_twice").failure(twice[0]) from None
        raise


def _covered(answer: Any) -> np.ndarray:
    """Return how often the tiles of an answer see each query and key, in a table that is large enough for every call."""
    return drawn(read_tiles(answer, LARGEST), LARGEST.q[2], LARGEST.k[2])


def _covered_twice(tiles: Sequence[Bounds], pair: Pair) -> str:
    """Return a text that names two tiles, and a query and a key that both tiles cover.

    The text is "" if no two tiles overlap.
    """
    for row, key in np.argwhere(drawn(tiles, pair.q[2], pair.k[2]) > 1):
        return _both(tiles, pair, row, key)
    return ""


def _both(tiles: Iterable[Bounds], pair: Pair, row: int, key: int) -> str:
    """Return a text that names two tiles that cover this row and key; "" if there are no two."""
    both = [tile for tile in tiles if _times([tile], np.array([row]), np.array([key]))[0]]
    return f"{pair.text}: row {row} sees key {key} in {both[0]} and in {both[1]}" if both[1:] else ""


def _answered(subject: Any, pair: Pair, twice: list[str]) -> Answered:
    """Return how often the tiles see each pair, and the right table.

    If tiles overlap, a text about the overlap is appended to `twice`.
    """
    tiles = read_tiles(subject.call(pair.q, pair.k), pair)
    for q0, q1, k0, k1, causal in tiles:
        if causal and q1 - q0 != k1 - k0:
            raise mistake("causal_not_square").failure(f"{pair.text}: rows {q0} to {q1}, keys {k0} to {k1}")
    if both := _covered_twice(tiles, pair):
        twice.append(both)
    times, right = drawn(tiles, pair.q[2], pair.k[2]), mask(pair.q, pair.k)
    return Answered(times, right, 0.0, names=("times seen [query, key]",), text=pair.text)


def equal_pairs(rng: np.random.Generator) -> list[Pair]:
    """Return pairs of runs of equal length, with the shifts that occur in layouts that are dealt."""
    pairs = [((0, 1, 1), (0, 1, 1)), ((0, 1, 2), (0, 1, 2)), ((2, 1, 2), (0, 1, 2)), ((0, 1, 2), (2, 1, 2))]
    pairs += [((a, 4, 3), (b, 4, 3)) for a, b in ((0, 0), (2, 1), (1, 2), (0, 3), (3, 0), (12, 1), (1, 12))]
    return [_later(rng, *pair) for pair in pairs]


def ragged_pairs(rng: np.random.Generator) -> list[Pair]:
    """Return pairs of runs of different lengths, as at the end of a sequence that cannot be dealt evenly."""
    lengths = ((1, 2), (2, 1), (2, 4), (4, 2), (3, 5), (5, 4))
    starts = ((0, 0), (1, 2), (2, 1), (0, 9), (9, 0))
    return [_later(rng, (a, 4, n), (b, 4, m)) for n, m in lengths for a, b in starts]


def _later(rng: np.random.Generator, q: Run, k: Run) -> Pair:
    """Return the two runs at random later positions, where the same pairs are visible.

    Steps above 1 also become longer.
    """
    begin, longer = int(rng.integers(10_000)), int(rng.integers(5)) if q[1] > 1 else 0
    step = q[1] + longer
    starts = [begin + start // q[1] * step + start % q[1] for start in (q[0], k[0])]
    return Pair((starts[0], step, q[2]), (starts[1], step, k[2]))


def holds(subject: Any) -> bool:
    """Return whether the submission's tiles_between is right for small runs; True if it is not written."""
    try:
        subject, rng = subject.other("tiles_between"), np.random.default_rng(0)
        pairs = [*equal_pairs(rng), *ragged_pairs(rng)]
        pairs += [Pair((20, 4, 3), (7, 4, 6)), Pair((7, 4, 6), (20, 4, 3))]
        answers = [(read_tiles(subject.call(*pair), pair), pair) for pair in pairs]
    except NotWritten:
        return True
    except Failure:
        return False
    return not any(_is_empty(tile) for tiles, _ in answers for tile in tiles) and all(
        np.array_equal(drawn(_square(tiles), pair.q[2], pair.k[2]), mask(*pair)) for tiles, pair in answers
    )


def _check_equal(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, equal_pairs(rng))


def _check_ragged(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, [*ragged_pairs(rng), *any_pairs(rng, 4)])


def _check_any_start(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, any_pairs(rng, 16))


def any_pairs(rng: np.random.Generator, times: int) -> list[Pair]:
    """Return pairs of runs that are shifted by several rows in either direction; the shortest runs come first."""
    pairs = []
    for n, m in ((3, 3), (4, 6), (7, 5)):
        for _ in range(times):
            step, begin = int(rng.integers(1, 7)), int(rng.integers(10_000))
            a, b = (begin + int(x) for x in rng.integers(0, 8 * step, 2))
            pairs.append(Pair((a, step, n), (b, step, m)))
    return pairs


def _check_few(subject: Any, rng: np.random.Generator) -> None:
    """Check that no tile is empty and that there are no more tiles than needed, because each tile is a launch.

    Where every row sees every key, one tile is enough. Elsewhere a triangle and the tiles beside it are
    enough.
    """
    starts = ((0, 0), (1, 2), (8, 3), (3, 11), (0, 64), (64, 0))
    wide = [_later(rng, (a, 4, 12), (b, 4, 9)) for a, b in starts]
    last = [_later(rng, (12, 4, n), (0, 4, 4)) for n in (1, 4)]  # here the first row sees all keys
    pairs = [*wide, *last, *equal_pairs(rng), *ragged_pairs(rng)]
    answers = [(read_tiles(subject.call(*pair), pair), pair) for pair in pairs]
    for tiles, pair in answers:
        if any(_is_empty(tile) for tile in tiles):
            raise mistake("empty_tiles").failure(pair.text)
    for tiles, pair in answers:
        if not np.array_equal(drawn(_square(tiles), pair.q[2], pair.k[2]), mask(*pair)):
            if both := _covered_twice(tiles, pair):
                raise mistake("covers_twice").failure(both)
            raise Failure(
                "the number of tiles is checked only when they cover each visible pair once.", pair.text
            )
        _expect_few(tiles, pair)


def _is_empty(tile: Bounds) -> bool:
    q0, q1, k0, k1, _ = tile
    return q0 == q1 or k0 == k1


def _square(tiles: Iterable[Bounds]) -> list[Bounds]:
    """Return all tiles except causal ones that are not square.

    It is not defined which pairs such a causal tile covers.
    """
    return [tile for tile in tiles if not tile[4] or tile[1] - tile[0] == tile[3] - tile[2]]


def _expect_few(tiles: list[Bounds], pair: Pair) -> None:
    """Raise Failure if there are more tiles than these two runs need."""
    needed = canonical(pair.q, pair.k)
    example = f"{pair.text}: {len(tiles):,} tiles, {len(needed)} are enough"
    if len(tiles) > MOST:
        raise mistake("row_by_row").failure(example)
    if len(tiles) > len(needed):
        if len(needed) == 1 and not needed[0][4]:
            raise mistake("full_in_pieces").failure(example)
        raise Failure("The visible pairs are covered, but by more tiles than necessary.", example)


def _check_long(subject: Any, rng: np.random.Generator) -> None:
    """Probe the coverage of runs of two million tokens at random places and at the edges."""
    _expect_no_mask(
        subject, rng
    )  # checked first, because an answer that makes masks would fill the memory in the runs below
    n = 2_000_003 + int(rng.integers(1000))
    for shift in (0, -1, -n, n - 2, int(rng.integers(2, n)), -int(rng.integers(2, n))):
        step = int(rng.integers(1, 9))
        pair = Pair((n * step, step, n), ((n - shift) * step, step, n))
        try:
            tiles = read_tiles(subject.call(pair.q, pair.k), pair)
        except Crashed as crash:
            if re.search("MemoryError|of memory|did not end within", crash.message):
                raise mistake("builds_the_mask").failure(f"{pair.text}: {crash.message}") from None
            raise
        if any(_is_empty(tile) for tile in tiles):
            raise mistake("empty_tiles").failure(pair.text)
        _expect_few(tiles, pair)
        _expect_covered(tiles, pair, shift, rng)


def _expect_covered(tiles: Sequence[Bounds], pair: Pair, shift: int, rng: np.random.Generator) -> None:
    """Probe rows at the edges and at random, each with keys around the diagonal and with random keys.

    Both runs have the same length.
    """
    n = pair.q[2]
    edges = [0, 1, n - 2, n - 1, -shift - 1, -shift, n - shift - 1, n - shift]
    rows = np.clip([*edges, *rng.integers(0, n, 200)], 0, n - 1)[:, None]
    keys = np.clip(np.hstack([rows + shift + np.arange(-1, 3), rng.integers(0, n, (len(rows), 2))]), 0, n - 1)
    wrong = np.argwhere(_times(tiles, rows, keys) != (keys <= rows + shift))
    if len(wrong):
        row, key = int(rows[wrong[0, 0], 0]), int(keys[tuple(wrong[0])])
        if both := _both(tiles, pair, row, key):
            raise mistake("covers_twice").failure(both)
        raise Failure("Long runs are covered wrongly.", f"{pair.text}: row {row} and key {key}")


def _expect_no_mask(subject: Any, rng: np.random.Generator) -> None:
    """Check that a call needs at most 4 MiB.

    The mask of the two runs takes 16 MiB, and the positions of their tokens take 64 KiB.
    """
    begin, shift = int(rng.integers(1, 1000)), int(rng.integers(100, 4000))
    pair = Pair((begin + shift, 1, 4096), (begin, 1, 4096))
    called = [subject.measure(pair.q, pair.k) for _ in range(2)]
    peak = min(each.peak_bytes for each in called)  # the smaller one, because an import may add to a peak
    for each in called:
        _expect_covered(read_tiles(each.answer, pair), pair, shift, rng)
    if peak > 4 << 20:
        raise mistake("builds_the_mask").failure(f"{pair.text}: {peak / 2**20:.0f} MiB")


def _times(tiles: Iterable[Bounds], rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return how often the tiles see these pairs of a row and a key."""
    times = np.zeros(keys.shape, dtype=np.int64)
    for q0, q1, k0, k1, causal in tiles:
        inside = (rows >= q0) & (rows < q1) & (keys >= k0) & (keys < k1)
        times += inside & ((keys - k0 <= rows - q0) | (not causal))
    return times


HINTS = (
    "How many keys does each row of the queries (2, 4, 4) see of the keys (2, 4, 4)? Then do the same for the queries (1, 4, 4) "
    "and (10, 4, 4). Each row sees one key more than the row above it, until there are no more keys. Which single number "
    "distinguishes these staircases, and how do you get it from two starts and a step?",
    "Call that number d: row i sees the keys j ≤ i + d. Ask two questions first. For which d does even the last row see no key? "
    "For which d does even the first row see the last key? For any d in between, draw the staircase in a table of rows × keys: "
    "which rows are on its slope, which keys are left of the slope, which rows are below it? Try d = −1, d = 2, and more "
    "rows than keys.",
    r"rows $\max(0,-d)$ to $\min(n_q,\,n_k-d)$ with the keys from $\max(0,d)$ on: causal; keys $0$ to $d$ of the same rows: full; "
    r"rows from $n_k-d$ to $n_q$ with all keys: full",
)

STAGE = Stage(
    id="07.relation",
    function="tiles_between",
    title="Skip, full, causal, shifted by one",
    hints=HINTS,
    misconceptions=misconceptions_of("07.relation"),
    checks=(
        Check("equal", 3, "visible", "two runs of one length: skip, full, causal, shifted", _check_equal),
        Check("ragged", 2, "visible", "two runs of different lengths, any shift", _check_ragged),
        Check("few", 1, "visible", "no more tiles than necessary, none empty", _check_few, kind="cost"),
        Check("any_start", 2, "stress", "runs that begin anywhere", _check_any_start),
        Check("long", 1, "held-out", "runs of two million tokens", _check_long),
    ),
)
