"""Common mistakes of 07.relation, each with a function that covers the same wrong pairs.

Imitations take a run of queries and a run of keys and return how often each pair is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("07.relation")

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
    mistake("sees_everything", _everything),
    mistake("strictly_before", _strict),
    mistake("sees_the_future", _upper),
    mistake("shifted_is_causal", _by_shift(_never_negative_one)),
    mistake("always_causal", _local),
    mistake("truncates", truncated),
    mistake("forgets_the_step", _by_shift(lambda q, k: q[0] - k[0])),
    mistake("by_start_only", _by_start),
    mistake("drops_the_rest", _triangle_only),
    mistake("knows_two_shifts", _four_only(wide=True, by_sign=True)),
    mistake("only_four_kinds", _four_only(wide=False, by_sign=True)),
    mistake("last_index_for_stop", _last_index(triangles=False)),
    mistake("causal_not_square"),
    mistake("row_by_row"),
    mistake("full_in_pieces"),
    mistake("builds_the_mask"),
    mistake("empty_tiles"),
)
NAMED = {each.name: each for each in MISTAKES}
COVERED = (
    *MISTAKES,
    replace(NAMED["knows_two_shifts"], imitate=_four_only(wide=True, by_sign=False)),
    replace(NAMED["only_four_kinds"], imitate=_four_only(wide=False, by_sign=False)),
    replace(NAMED["last_index_for_stop"], imitate=_last_index(triangles=True)),
)
"""What wrong tiles are compared with: some mistakes can be made in more than one way."""
