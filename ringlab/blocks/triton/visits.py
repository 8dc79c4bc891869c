"""From tiles to launch tables: the rows that each program owns, and the keys that it walks over.

Rows are cut into bands where tiles begin and end. Adjacent bands are merged again if one rule describes
their masks. A band is cut into programs of at most a block of rows. A program visits a list of segments of
keys. Each segment has two bounds: key j is visible to row i where i + low ≤ j ≤ i + high. Causal tiles set
`high`. The left edge of a window, whose tiles are mirrored, sets `low`. A segment begins with the tiles that
all rows of the program see in full, which need no mask. Masked tiles follow. The left edge of a window is a
separate segment. Keys that no row sees are not visited.

Programs of dK/dV own keys and walk over rows. With the order of both axes reversed, this is the same
problem, and the same functions solve it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringlab.errors import ShapeError
from ringlab.tile import Tile
from ringlab.upload import kept_for_each_stream, upload

ALL = 2**30
"""A number above every token's index: the `high` of a segment without this bound. −ALL is such a low."""


class Visits(NamedTuple):
    """The tables of one launch, int32.

    programs: (start, stop, first segment, last segment) of each program. Programs with the longest walks are
    first, so that no long program runs alone at the end. segments: (begin, split, end, high). From begin to
    split no mask is needed, and the length is a multiple of the tile's length. From split to end all tiles
    are masked. For dK/dV, which walk over rows, the masked part is first. lows: the `low` of each segment, or
    None if no segment has one.
    """

    programs: Tensor
    segments: Tensor
    lows: Tensor | None

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tables as arguments of a kernel.

        If `lows` is None another table is passed in its place, because the kernel does not read it without
        WINDOW.
        """
        return self.programs, self.segments, self.programs if self.lows is None else self.lows


Segment = tuple[int, int, int, int, int]


class Program(NamedTuple):
    """A program's rows start … stop, and its segments, each (begin, split, end, high, low)."""

    start: int
    stop: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class _Stretch:
    """A range of keys begin … end, in which row i sees the keys from i + low to i + high."""

    begin: int
    end: int
    high: int = ALL
    low: int = -ALL

    def seen_by(self, start: int, stop: int) -> _Stretch | None:
        """Return the part of the stretch that rows start … stop see, or None if they see no key of it."""
        begin, end = max(self.begin, start + self.low), min(self.end, stop + self.high)
        if end <= begin:
            return None
        high = ALL if start + self.high + 1 >= end else self.high
        low = -ALL if stop - 1 + self.low <= begin else self.low
        return _Stretch(begin, end, high, low)

    def joined(self, after: _Stretch, start: int, stop: int) -> _Stretch | None:
        """Return one stretch for both this one and `after`, in rows start … stop, or None if no rule describes both."""
        reach = self.high == after.high or (self.high == ALL and start + after.high + 1 >= self.end)
        begin = self.low == after.low or (after.low == -ALL and stop - 1 + self.low <= after.begin)
        if self.end == after.begin and reach and begin:
            return _Stretch(self.begin, after.end, after.high, self.low)
        return None


class _Band(NamedTuple):
    start: int
    stop: int
    stretches: tuple[_Stretch, ...]


def row_programs(
    tiles: Iterable[Tile], n_rows: int, block_m: int, block_n: int, every_row: bool
) -> tuple[Program, ...]:
    """Return the programs of the forward step and of dQ: `block_m` rows each, with `block_n` keys in a tile.

    With `every_row`, rows that see no key also have a program, without segments, which writes their results.
    """
    programs = [
        Program(start, stop, tuple(_segments(band.stretches, start, stop, block_n)))
        for band in _bands(tuple(tiles), n_rows, every_row)
        for start, stop in _cut(band, block_m)
    ]
    return tuple(sorted(programs, key=lambda program: -_length(program, block_n)))


def key_programs(
    tiles: Iterable[Tile], n_rows: int, n_keys: int, block_m: int, block_n: int
) -> tuple[Program, ...]:
    """Return the programs of dK/dV: `block_n` keys each, with `block_m` rows in a tile.

    Each key is in one program.
    """
    turned = [
        Tile(
            n_keys - t.k_stop, n_keys - t.k_start, n_rows - t.q_stop, n_rows - t.q_start, t.causal, t.mirrored
        )
        for t in tiles
    ]
    moved = n_keys - n_rows
    return tuple(
        Program(
            n_keys - stop,
            n_keys - start,
            tuple(
                (n_rows - end, n_rows - split, n_rows - begin, _moved(high, moved), _moved(low, moved))
                for begin, split, end, high, low in reversed(segments)
            ),
        )
        for start, stop, segments in row_programs(turned, n_keys, block_n, block_m, True)
    )


def _moved(bound: int, by: int) -> int:
    return bound if abs(bound) == ALL else bound + by


@kept_for_each_stream(4096)
def row_visits(
    tiles: tuple[Tile, ...], n_rows: int, block_m: int, block_n: int, every_row: bool, device: torch.device
) -> Visits:
    """Return the tables of `row_programs` on `device`."""
    return _tables(row_programs(tiles, n_rows, block_m, block_n, every_row), device)


@kept_for_each_stream(4096)
def key_visits(
    tiles: tuple[Tile, ...], n_rows: int, n_keys: int, block_m: int, block_n: int, device: torch.device
) -> Visits:
    """Return the tables of `key_programs` on `device`."""
    return _tables(key_programs(tiles, n_rows, n_keys, block_m, block_n), device)


@lru_cache(maxsize=4096)
def check_tiles(tiles: tuple[Tile, ...], n_rows: int, n_keys: int) -> None:
    """Check that all tiles are within `n_rows` rows and `n_keys` keys, and that causal tiles are square.

    Raises: ShapeError.
    """
    for t in tiles:
        if not (0 <= t.q_start <= t.q_stop <= n_rows and 0 <= t.k_start <= t.k_stop <= n_keys):
            remedy = "plan the tiles for these shards: ringlab.plan.tiles"
            raise ShapeError(f"tiles within {n_rows} rows and {n_keys} keys", str(t), remedy)
        if t.causal and t.q_stop - t.q_start != t.k_stop - t.k_start:
            remedy = "cut off the rows that see all keys as a tile that is not causal"
            raise ShapeError("causal tiles with as many keys as rows", str(t), remedy)


def _bands(tiles: tuple[Tile, ...], n_rows: int, every_row: bool) -> list[_Band]:
    """Return as few bands of adjacent rows as possible, with the keys that the rows see.

    Rows that see no key are in no band, unless `every_row` is true.
    """
    edges = {0, n_rows, *(t.q_start for t in tiles), *(t.q_stop for t in tiles)}
    cuts = sorted(edges)
    begins, ends = (np.array([getattr(t, name) for t in tiles], int) for name in ("q_start", "q_stop"))
    bands: list[_Band] = []
    for start, stop in pairwise(cuts):
        met = [tiles[index] for index in np.flatnonzero((begins <= start) & (ends >= stop))]
        stretches = _seen([_stretch(tile) for tile in met], start, stop)
        if not (stretches or every_row):
            continue
        bands.append(_Band(start, stop, stretches))
        while len(bands) > 1 and (merged := _one_band(*bands[-2:])):
            bands[-2:] = [merged]
    return bands


def _stretch(tile: Tile) -> _Stretch:
    bound = {"low" if tile.mirrored else "high": tile.k_start - tile.q_start} if tile.causal else {}
    return _Stretch(tile.k_start, tile.k_stop, **bound)


def _seen(stretches: Iterable[_Stretch], start: int, stop: int) -> tuple[_Stretch, ...]:
    """Return the parts of the stretches that rows start … stop see, ascending, clipped and joined."""
    found: list[_Stretch] = []
    for stretch in sorted(stretches, key=lambda s: s.begin):
        part = stretch.seen_by(start, stop)
        if part is None:
            continue
        both = found[-1].joined(part, start, stop) if found else None
        found[-1:] = [both] if both else [*found[-1:], part]
    return tuple(found)


def _one_band(above: _Band, below: _Band) -> _Band | None:
    """Return both bands as one, or None if they are not adjacent or no single list of stretches describes both.

    The list is that of one of the bands, or the union of both bands' stretches, as for the rows of a window.
    """
    if above.stop != below.start:
        return None
    around = tuple(
        _Stretch(min(a.begin, b.begin), max(a.end, b.end), min(a.high, b.high), max(a.low, b.low))
        for a, b in zip(above.stretches, below.stretches, strict=False)
    )
    for stretches in (below.stretches, above.stretches, around):
        if all(_seen(stretches, band.start, band.stop) == band.stretches for band in (above, below)):
            return _Band(above.start, below.stop, _seen(stretches, above.start, below.stop))
    return None


def _cut(band: _Band, block: int) -> Iterator[tuple[int, int]]:
    for start in range(band.start, band.stop, block):
        yield start, min(start + block, band.stop)


def _segments(stretches: tuple[_Stretch, ...], start: int, stop: int, block: int) -> Iterator[Segment]:
    """Yield the stretches as segments: up to `split` whole blocks that all rows see, then masked blocks."""
    for stretch in _seen(stretches, start, stop):
        begin, end, high, low = stretch.begin, stretch.end, stretch.high, stretch.low
        if low != -ALL:
            edge = min(end, begin + _whole(stop - 1 + low - begin, block))
            yield begin, begin, edge, high, low
            begin = edge
        if begin < end:
            all_see = max(begin, min(end, start + high + 1))
            yield begin, begin + (all_see - begin) // block * block, end, high, low


def _whole(length: int, block: int) -> int:
    """Return `length` rounded up to whole blocks."""
    return -(-length // block) * block


def _length(program: Program, block: int) -> int:
    """Return the number of tiles that a program visits."""
    return sum(
        (split - begin + _whole(end - split, block)) // block for begin, split, end, *_ in program.segments
    )


def _tables(programs: tuple[Program, ...], device: torch.device) -> Visits:
    counts = np.cumsum([0, *(len(program.segments) for program in programs)])
    owners = [
        (program.start, program.stop, first, last)
        for program, first, last in zip(programs, counts, counts[1:], strict=False)
    ]
    segments = [segment for program in programs for segment in program.segments]
    whole = np.array(segments or [(0, 0, 0, ALL, -ALL)])

    def on_device(table: np.ndarray) -> Tensor:
        return upload(table.astype(np.int32), device)

    has_low = bool((whole[:, 4] > -ALL).any())
    return Visits(
        on_device(np.array(owners).reshape(-1, 4)),
        on_device(whole[:, :4]),
        on_device(whole[:, 4]) if has_low else None,
    )
