"""Common mistakes of 07.relation, each with a function that covers the same wrong pairs.

Imitations take a run of queries and a run of keys and return how often each pair is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from ringlab.course.contract import Misconception

Run = tuple[int, int, int]
Bounds = tuple[int, int, int, int, bool]


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


def _by_shift(shift: Callable[[Run, Run], int]) -> Callable[[Run, Run], np.ndarray]:
    """An imitation in which row i sees the keys j ≤ i + shift."""

    def imitate(q: Run, k: Run) -> np.ndarray:
        return np.tri(q[2], k[2], shift(q, k))

    return imitate


def _floor(q: Run, k: Run) -> int:
    return (q[0] - k[0]) // q[1]


def _never_negative_one(q: Run, k: Run) -> int:
    shift = _floor(q, k)
    return 0 if shift == -1 else shift


def truncated(q: Run, k: Run) -> np.ndarray:
    """Return what is seen when the shift is rounded towards zero: (n_q, n_k)."""
    return np.tri(q[2], k[2], int((q[0] - k[0]) / q[1]))


def canonical(q: Run, k: Run) -> list[Bounds]:
    """Return the tiles of two runs: a full one, or a triangle, the keys before it and the rows after it."""
    shift, (n_q, n_k) = _floor(q, k), (q[2], k[2])
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


def _everything(q: Run, k: Run) -> np.ndarray:
    return np.ones((q[2], k[2]))


def _strict(q: Run, k: Run) -> np.ndarray:
    rows, keys = (start + step * np.arange(length) for start, step, length in (q, k))
    return (rows[:, None] > keys[None, :]).astype(np.float64)


def _upper(q: Run, k: Run) -> np.ndarray:
    return mask(k, q).T


def _local(q: Run, k: Run) -> np.ndarray:
    return np.tri(q[2], k[2])


def _by_start(q: Run, k: Run) -> np.ndarray:
    """A triangle where the starts are equal, else everything or nothing."""
    return _local(q, k) if q[0] == k[0] else np.full((q[2], k[2]), float(q[0] > k[0]))


def _triangle_only(q: Run, k: Run) -> np.ndarray:
    """The largest triangle, without the keys before it and the rows after it."""
    tiles = canonical(q, k)
    if any(tile[4] for tile in tiles):
        tiles = [tile for tile in tiles if tile[4]]
    return drawn(tiles, q[2], k[2])


def _last_index(triangles: bool) -> Callable[[Run, Run], np.ndarray]:
    """Stops that name the last row and key instead of the ones after them; in triangles too, or not."""

    def imitate(q: Run, k: Run) -> np.ndarray:
        tiles = [
            (q0, q1 - 1, k0, k1 - 1, causal) if triangles or not causal else (q0, q1, k0, k1, causal)
            for q0, q1, k0, k1, causal in canonical(q, k)
        ]
        return drawn(tiles, q[2], k[2])

    return imitate


def _four_only(wide: bool, by_sign: bool) -> Callable[[Run, Run], np.ndarray]:
    """Skip, full, causal or shifted by one; any other shift is taken for full or skip by its sign, or for skip.

    Triangles are square, or, with `wide`, have all rows and keys.
    """

    def imitate(q: Run, k: Run) -> np.ndarray:
        shift, (n_q, n_k) = _floor(q, k), (q[2], k[2])
        if shift not in (-1, 0):
            known = shift >= n_k - 1 or (by_sign and shift > 0)
            return np.full((n_q, n_k), float(known))
        if wide:
            return np.tri(n_q, n_k, shift)
        if shift <= -n_q or shift >= n_k - 1:
            return mask(q, k)
        n, seen = min(n_q, n_k), np.zeros((n_q, n_k))
        seen[:n, :n] = np.tri(n, n, shift)
        return seen

    return imitate


MISTAKES = (
    Misconception(
        "sees_everything",
        "Every query sees every key here. Under a causal mask the keys after a query's own position are hidden.",
        _everything,
    ),
    Misconception(
        "strictly_before",
        "A token sees itself: where a query and a key stand at the same position, the pair is visible. The test is ≥.",
        _strict,
    ),
    Misconception(
        "sees_the_future",
        "Upside down: your queries see the keys at and after themselves. Row i sees keys 0 to i of a causal tile, the lower "
        "triangle.",
        _upper,
    ),
    Misconception(
        "shifted_is_causal",
        "Queries that begin a little before the keys got a plain triangle. There row i stands just before key i: row 0 sees "
        "nothing, row 1 sees key 0. That is causal shifted by one, a triangle of q[1:] with k[:-1].",
        _by_shift(_never_negative_one),
    ),
    Misconception(
        "always_causal",
        "Every pair of runs got a triangle by local indices. Two runs may lie apart, all of one after all of the other, or be "
        "shifted against each other: it depends on their starts.",
        _local,
    ),
    Misconception(
        "truncates",
        "The shift was rounded towards zero. When queries begin before the keys the difference is negative, and −1/4 of a "
        "step is a shift of −1, not 0: use floor division, //.",
        truncated,
    ),
    Misconception(
        "forgets_the_step",
        "The shift counts rows, not tokens: starts that differ by 3 in runs of step 4 are less than one row apart. Divide the "
        "difference by the step.",
        _by_shift(lambda q, k: q[0] - k[0]),
    ),
    Misconception(
        "by_start_only",
        "A run that begins later does not lie behind the whole other run: with a step of several tokens they interleave. "
        "Compare the shift with the lengths.",
        _by_start,
    ),
    Misconception(
        "drops_the_rest",
        "The triangle is right and what lies beside it is missing: when the shift is positive all its rows see the keys before it, "
        "and rows that come after it see all keys. Give those as full tiles.",
        _triangle_only,
    ),
    Misconception(
        "knows_two_shifts",
        "A shift of more than one row was taken for full or for skip. Runs of a cut document or of hand-made layouts may "
        "begin anywhere: cut off the keys that all rows see, or the rows that see nothing.",
        _four_only(wide=True, by_sign=True),
    ),
    Misconception(
        "only_four_kinds",
        "You know four kinds of pair, and a triangle of as many rows as the shorter run has. Here runs differ in length or are "
        "shifted by more than one row: keys before the triangle that all its rows see, and rows after it that see all "
        "keys, are missing or too many.",
        _four_only(wide=False, by_sign=True),
    ),
    Misconception(
        "last_index_for_stop",
        "A full tile ends too early: a stop is the index after the last row or key, as in a slice, so all n rows are 0 to n, not 0 to "
        "n − 1.",
        _last_index(triangles=False),
    ),
    Misconception(
        "causal_not_square",
        "A causal tile must be square: its row i sees its keys 0 to i. With more keys than rows the last keys are seen by "
        "nobody, with more rows than keys the last rows see all: give those tiles of their own.",
    ),
    Misconception(
        "row_by_row",
        "Right, and cut into far too many tiles: every tile is a launch and a merge. Between two runs of one step there is one "
        "triangle at most, with one full tile before it and one after it.",
    ),
    Misconception(
        "full_in_pieces",
        "Every row sees every key here, and one full tile says so. It came in pieces: already from a shift of n_k − 1 on, not only "
        "from n_k on, the first row sees the last key.",
    ),
    Misconception(
        "builds_the_mask",
        "Runs of two million tokens ran out of memory or time: the answer hangs on two starts, a step and two lengths. "
        "Compute the bounds from these; look at no pair of tokens.",
    ),
    Misconception(
        "empty_tiles",
        "There is a tile without a row or without a key. Leave it out: a launch for nothing, and a softmax of no key at all.",
    ),
)
NAMED = {mistake.name: mistake for mistake in MISTAKES}
COVERED = (
    *MISTAKES,
    replace(NAMED["knows_two_shifts"], imitate=_four_only(wide=True, by_sign=False)),
    replace(NAMED["only_four_kinds"], imitate=_four_only(wide=False, by_sign=False)),
    replace(NAMED["last_index_for_stop"], imitate=_last_index(triangles=True)),
)
"""What wrong tiles are compared with: some mistakes can be made in more than one way."""
