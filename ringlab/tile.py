"""The tile, a rectangle of query rows × keys, and how a band of visible pairs is cut into tiles.

`ringlab.plan` makes tiles; the schedules hand them to a block backend, one K/V block at a time.

Take a run of queries and a run of keys with the same step. Row i sees keys i + lo … i + hi: a band. The
causal mask sets the right edge hi of the band, and a sliding window sets its left edge lo. The band is cut
into full rectangles and triangles. A triangle at the right edge is `causal`. A triangle at the left edge is
also `mirrored`: it is a causal triangle if rows and keys are counted from the end. A block backend therefore
needs no mask beyond `causal: bool`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    """Local query rows [q_start, q_stop) × local keys [k_start, k_stop).

    A `causal` tile is square and its row i sees keys 0 … i of the tile. Without `causal` every row sees every key.
    With `causal` and `mirrored`, rows and keys are counted from the end: row i sees key i and the keys after
    key i.

    >>> Tile(4, 8, 0, 4, causal=True).scores
    10
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool
    mirrored: bool = False

    def __repr__(self) -> str:
        edges = ", ".join(
            f"{name}={getattr(self, name)}" for name in ("q_start", "q_stop", "k_start", "k_stop", "causal")
        )
        return f"Tile({edges}{', mirrored=True' if self.mirrored else ''})"

    @property
    def rows(self) -> slice:
        """Return the slice of query rows."""
        return slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> slice:
        """Return the slice of keys."""
        return slice(self.k_start, self.k_stop)

    @property
    def scores(self) -> int:
        """Return the number of visible (query, key) pairs."""
        rows, keys = self.q_stop - self.q_start, self.k_stop - self.k_start
        return rows * (rows + 1) // 2 if self.causal else rows * keys

    def reversed(self, rows: int, keys: int) -> Tile:
        """Return the same tile after the order of both axes of its `rows` × `keys` block is reversed."""
        return Tile(
            rows - self.q_stop, rows - self.q_start, keys - self.k_stop, keys - self.k_start,
            self.causal, self.causal and not self.mirrored,
        )  # fmt: skip

    def shifted(self, rows: int, keys: int) -> Tile:
        """Return this tile moved down by `rows` rows and right by `keys` keys."""
        return replace(
            self, q_start=self.q_start + rows, q_stop=self.q_stop + rows,
            k_start=self.k_start + keys, k_stop=self.k_stop + keys,
        )  # fmt: skip


def band(n: int, m: int, lo: int, hi: int) -> list[Tile]:
    """Return tiles for `n` rows and `m` keys in which row i sees keys i + lo … i + hi.

    The tiles do not overlap, and are in no particular order.
    """
    lo, hi = max(lo, -n), min(hi, m)
    first, last = max(0, -hi), min(n, m - lo)
    if hi < lo or first >= last:
        return []
    if first > 0 or last < n:
        return [tile.shifted(first, 0) for tile in band(last - first, m, lo + first, hi + first)]
    if n - 1 + lo <= 0:
        return right_edge(n, m, hi)
    if hi >= m - 1:
        return _left_edge(n, m, lo)
    tiles = []
    width = hi - lo + 1
    for row in range(0, n, width):
        rows = min(width, n - row)
        left, middle, right = row + lo, row + lo + rows, row + hi + 1
        for start, stop, cut_left in (
            (left, middle, True),
            (middle, right, None),
            (right, right + rows - 1, False),
        ):
            key, keys = max(0, start), min(m, stop) - max(0, start)
            if keys <= 0:
                continue
            if cut_left is None:
                parts = [Tile(0, rows, 0, keys, False)]
            elif cut_left:
                parts = _left_edge(rows, keys, start - key)
            else:
                parts = right_edge(rows, keys, start - key - 1)
            tiles += [part.shifted(row, key) for part in parts]
    return tiles


def right_edge(n: int, m: int, hi: int) -> list[Tile]:
    """Return tiles for `n` rows and `m` keys in which row i sees keys 0 … i + hi."""
    if hi <= -n:
        return []
    if hi >= m - 1:
        return [Tile(0, n, 0, m, False)]
    first, last = max(0, -hi), min(n, m - hi)
    parts = [Tile(first, last, first + hi, last + hi, True)]
    if first + hi > 0:
        parts.append(Tile(first, last, 0, first + hi, False))
    if last < n:
        parts.append(Tile(last, n, 0, m, False))
    return parts


def _left_edge(n: int, m: int, lo: int) -> list[Tile]:
    """Return tiles in which row i sees keys i + lo … m − 1. It is the right edge with both axes reversed."""
    return [tile.reversed(n, m) for tile in right_edge(n, m, m - n - lo)]


def cut(tile: Tile, largest: int | None) -> Iterator[Tile]:
    """Yield `tile`, or its parts if it is causal: triangles of at most `largest` rows, and full tiles.

    Each cut replaces a triangle by two triangles of about half the rows and the full tile between them.
    """
    rows = tile.q_stop - tile.q_start
    if not tile.causal or largest is None or rows <= largest:
        yield tile
        return
    if tile.mirrored:
        for part in cut(Tile(0, rows, 0, rows, True), largest):
            yield part.reversed(rows, rows).shifted(tile.q_start, tile.k_start)
        return
    half = largest
    while 2 * half < rows:
        half *= 2
    row, key = tile.q_start + half, tile.k_start + half
    yield from cut(Tile(tile.q_start, row, tile.k_start, key, True), largest)
    yield Tile(row, tile.q_stop, tile.k_start, key, False)
    yield from cut(Tile(row, tile.q_stop, key, tile.k_stop, True), largest)
