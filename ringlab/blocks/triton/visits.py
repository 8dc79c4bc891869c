"""From tiles to launch tables: the rows that each program owns, and the keys that it walks over.

Rows are cut into bands where tiles begin and end; adjacent bands are merged again if one rule describes their masks. A
band is cut into programs of at most a block of rows. A program visits a list of segments of keys, each with a shift:
key j is visible to row i where j ≤ i + shift. Within a segment, tiles that all rows of the program see in full, which
need no mask, come first, and masked tiles after them. Keys that no row sees are not visited.

dK/dV own keys and walk over rows. With the order of both axes reversed it is the same problem, and the same functions
solve it.
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

ALL = 2**30
"""The shift of a segment that every row of its program sees in full: more than any token's index."""


class Visits(NamedTuple):
    """The tables of one launch, int32.

    programs: (start, stop, first segment, last segment) of each program, longest walks first, so that no program runs
    alone at the end. segments: (begin, split, end, shift). From begin to split nothing is masked and the length is a
    multiple of the tile's; from split to end everything is masked. For dK/dV, which walk over rows, the masked part
    comes first.
    """

    programs: Tensor
    segments: Tensor

    def on_this_stream(self) -> Visits:
        """Return the tables after registering the current stream with the allocator as their reader.

        Tables are cached for calls on any stream: their memory must not be reused while one of these still runs.
        """
        for table in self:
            if table.is_cuda:
                table.record_stream(torch.cuda.current_stream(table.device))
        return self


class Program(NamedTuple):
    """Rows start … stop and the (begin, split, end, shift) of their segments."""

    start: int
    stop: int
    segments: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class _Stretch:
    """Keys begin … end, visible to row i up to i + shift, or all of them if shift is None."""

    begin: int
    end: int
    shift: int | None

    def seen_by(self, start: int, stop: int) -> _Stretch | None:
        """Return the part of which rows start … stop see something; None if they see nothing."""
        if self.shift is None:
            return self
        end = min(self.end, stop + self.shift)
        if end <= self.begin:
            return None
        return _Stretch(self.begin, end, None if start + self.shift + 1 >= end else self.shift)

    def joined(self, after: _Stretch, start: int) -> _Stretch | None:
        """Return both as one, for rows from `start` on; None if no single rule describes both."""
        if self.end != after.begin:
            return None
        if self.shift == after.shift or (
            self.shift is None and after.shift is not None and start + after.shift + 1 >= self.end
        ):
            return _Stretch(self.begin, after.end, after.shift)
        return None


class _Band(NamedTuple):
    start: int
    stop: int
    stretches: tuple[_Stretch, ...]


def row_programs(
    tiles: Iterable[Tile], n_rows: int, block_m: int, block_n: int, every_row: bool
) -> tuple[Program, ...]:
    """Return the programs of the forward step and of dQ: `block_m` rows, walking over `block_n` keys a tile.

    With `every_row`, rows that see nothing have a program too, without segments, which writes them.
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
    """Return the programs of dK/dV: `block_n` keys, walking over `block_m` rows a tile; each key is in one."""
    mirrored = [
        Tile(n_keys - t.k_stop, n_keys - t.k_start, n_rows - t.q_stop, n_rows - t.q_start, t.causal)
        for t in tiles
    ]
    return tuple(
        Program(
            n_keys - stop,
            n_keys - start,
            tuple(
                (n_rows - end, n_rows - split, n_rows - begin, ALL if s == ALL else s + n_keys - n_rows)
                for begin, split, end, s in reversed(segments)
            ),
        )
        for start, stop, segments in row_programs(mirrored, n_keys, block_n, block_m, True)
    )


@lru_cache(maxsize=4096)
def row_visits(
    tiles: tuple[Tile, ...], n_rows: int, block_m: int, block_n: int, every_row: bool, device: torch.device
) -> Visits:
    """Return the tables of `row_programs` on `device`."""
    return _tables(row_programs(tiles, n_rows, block_m, block_n, every_row), device)


@lru_cache(maxsize=4096)
def key_visits(
    tiles: tuple[Tile, ...], n_rows: int, n_keys: int, block_m: int, block_n: int, device: torch.device
) -> Visits:
    """Return the tables of `key_programs` on `device`."""
    return _tables(key_programs(tiles, n_rows, n_keys, block_m, block_n), device)


@lru_cache(maxsize=4096)
def check_tiles(tiles: tuple[Tile, ...], n_rows: int, n_keys: int) -> None:
    """Return if all tiles are within `n_rows` rows and `n_keys` keys, and causal ones square. Raises: ShapeError."""
    for t in tiles:
        if not (0 <= t.q_start <= t.q_stop <= n_rows and 0 <= t.k_start <= t.k_stop <= n_keys):
            remedy = "plan the tiles for these shards: ringlab.plan.tiles"
            raise ShapeError(f"tiles within {n_rows} rows and {n_keys} keys", str(t), remedy)
        if t.causal and t.q_stop - t.q_start != t.k_stop - t.k_start:
            remedy = "cut off the rows that see all keys as a tile that is not causal"
            raise ShapeError("causal tiles with as many keys as rows", str(t), remedy)


def _bands(tiles: tuple[Tile, ...], n_rows: int, every_row: bool) -> list[_Band]:
    """Return bands of adjacent rows with the keys they see, as few as possible, without rows that see nothing."""
    edges = {0, n_rows, *(t.q_start for t in tiles), *(t.q_stop for t in tiles)}
    cuts = sorted(edges)
    begins, ends = (np.array([getattr(t, name) for t in tiles], int) for name in ("q_start", "q_stop"))
    bands: list[_Band] = []
    for start, stop in pairwise(cuts):
        met = [tiles[index] for index in np.flatnonzero((begins <= start) & (ends >= stop))]
        stretches = _seen([_stretch(tile) for tile in met], start, stop)
        if not (stretches or every_row):
            continue
        band = _Band(start, stop, stretches)
        merged = _one_band(bands[-1], band) if bands and bands[-1].stop == start else None
        bands[-1:] = [merged] if merged else [*bands[-1:], band]
    return bands


def _stretch(tile: Tile) -> _Stretch:
    return _Stretch(tile.k_start, tile.k_stop, tile.k_start - tile.q_start if tile.causal else None)


def _seen(stretches: Iterable[_Stretch], start: int, stop: int) -> tuple[_Stretch, ...]:
    """Return what rows start … stop see of the stretches, in canonical form: ascending, clipped and joined."""
    found: list[_Stretch] = []
    for stretch in sorted(stretches, key=lambda s: s.begin):
        part = stretch.seen_by(start, stop)
        if part is None:
            continue
        both = found[-1].joined(part, start) if found else None
        found[-1:] = [both] if both else [*found[-1:], part]
    return tuple(found)


def _one_band(above: _Band, below: _Band) -> _Band | None:
    """Return both bands as one if the stretches of one describe what the other's rows see too, else None."""
    for stretches in (below.stretches, above.stretches):
        if all(_seen(stretches, band.start, band.stop) == band.stretches for band in (above, below)):
            return _Band(above.start, below.stop, stretches)
    return None


def _cut(band: _Band, block: int) -> Iterator[tuple[int, int]]:
    for start in range(band.start, band.stop, block):
        yield start, min(start + block, band.stop)


def _segments(
    stretches: tuple[_Stretch, ...], start: int, stop: int, block: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the stretches as (begin, split, end, shift): up to `split` whole blocks that all rows see."""
    for stretch in _seen(stretches, start, stop):
        end = stretch.end if stretch.shift is None else min(stretch.end, start + stretch.shift + 1)
        split = stretch.begin + max(0, end - stretch.begin) // block * block
        yield stretch.begin, split, stretch.end, ALL if stretch.shift is None else stretch.shift


def _length(program: Program, block: int) -> int:
    """Return the number of tiles that a program visits."""
    return sum(
        (split - begin) // block + -(-(end - split) // block) for begin, split, end, _ in program.segments
    )


def _tables(programs: tuple[Program, ...], device: torch.device) -> Visits:
    counts = np.cumsum([0, *(len(program.segments) for program in programs)])
    owners = [
        (program.start, program.stop, first, last)
        for program, first, last in zip(programs, counts, counts[1:], strict=False)
    ]
    segments = [segment for program in programs for segment in program.segments]
    as_table = [np.array(rows, np.int32).reshape(-1, 4) for rows in (owners, segments or [(0, 0, 0, 0)])]
    return Visits(*(torch.from_numpy(table).to(device) for table in as_table))
