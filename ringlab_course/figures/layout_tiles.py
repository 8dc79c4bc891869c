"""The score tiles of a layout, in each rank's local order: skipped, partial or full under the mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ringlab import layout as layouts
from ringlab.errors import LayoutError
from ringlab.layout import Layout, dealt

NAMED: dict[str, Callable[[int, int], Layout]] = {
    name.replace("zigzag", "zig-zag"): make for name, make in layouts.LAYOUTS.items()
}
"""The layouts by the names that pictures use."""
LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    **NAMED,
    "token fold": lambda S, P: dealt(S, P, chunk=1, folded=True, name="token fold"),
}
SKIP, PARTIAL, FULL = 0, 1, 2
MOST_TOKENS, MOST_TILES = 8192, 256
"""The longest sequence whose mask is evaluated token by token, and the most tiles along a side."""


@dataclass(frozen=True)
class Tiles:
    """The score matrix of a layout in local order: queries of rank 0, 1, … down, their keys across.

    kinds[i, j] is SKIP, PARTIAL or FULL.
    sizes[i, j] is the number of scores in the tile, and visible[i, j] the number of unmasked ones.
    owner[i] is the rank of tile row (and column) i, and bounds[i] its first token.
    """

    layout: Layout
    tile: int
    kinds: np.ndarray
    sizes: np.ndarray
    visible: np.ndarray
    owner: np.ndarray
    bounds: np.ndarray

    def count(self, kind: int) -> int:
        """Return the number of tiles of this kind."""
        return int((self.kinds == kind).sum())

    @property
    def computed(self) -> np.ndarray:
        """The number of scores that each rank computes, with masked ones in partial tiles: int64 (P,)."""
        rows = np.where(self.kinds == SKIP, 0, self.sizes).sum(axis=1)
        return np.bincount(self.owner, rows, self.layout.P).astype(np.int64)

    @property
    def overhead(self) -> float:
        """The number of computed scores, divided by the number of visible ones."""
        return float(self.computed.sum() / self.visible.sum())


def tiles_of(
    layout: Layout, tile: int, *, causal: bool = True, documents: Sequence[int] | None = None
) -> Tiles:
    """Return the tiles of a layout's score matrix, each with its kind under the mask.

    documents: the lengths of packed documents; no token sees another document's tokens.
    Raises: LayoutError for a tile below 1, more than 256 tiles along a side, more than 8,192 tokens, or
    documents that do not add up to S.
    """
    _check(layout, tile, documents)
    positions = np.concatenate([layout.positions(rank) for rank in range(layout.P)])
    mask = positions[:, None] >= positions[None, :] if causal else np.ones((layout.S, layout.S), bool)
    if documents is not None:
        document = np.repeat(np.arange(len(documents)), documents)[positions]
        mask &= document[:, None] == document[None, :]
    owner, bounds = _cuts(layout, tile)
    visible = np.add.reduceat(mask, bounds[:-1], axis=0, dtype=np.int64)
    visible = np.add.reduceat(visible, bounds[:-1], axis=1)
    lengths = np.diff(bounds)
    sizes = lengths[:, None] * lengths[None, :]
    kinds = np.where(visible == 0, SKIP, np.where(visible == sizes, FULL, PARTIAL))
    return Tiles(layout, tile, kinds, sizes, visible, owner, bounds)


def owners(layout: Layout) -> np.ndarray:
    """Return the rank that owns each token: int64 (S,)."""
    owner = np.empty(layout.S, np.int64)
    for rank in range(layout.P):
        owner[layout.positions(rank)] = rank
    return owner


def _cuts(layout: Layout, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the owner of every tile row, and where tile rows begin and end; no tile spans two ranks."""
    owner, bounds, begin = [], [0], 0
    for rank in range(layout.P):
        length = layout.length(rank)
        stops = [*range(tile, length, tile), length] if length else []
        owner += [rank] * len(stops)
        bounds += [begin + stop for stop in stops]
        begin += length
    return np.array(owner), np.array(bounds)


def _check(layout: Layout, tile: int, documents: Sequence[int] | None) -> None:
    if not isinstance(tile, (int, np.integer)) or tile < 1:
        raise LayoutError("tile >= 1 tokens, an integer", f"tile={tile!r}")
    if not 1 <= layout.S <= MOST_TOKENS:
        raise LayoutError(
            f"1 to {MOST_TOKENS:,} tokens for a picture",
            f"{layout.S:,}",
            "divide S and tile by the same number, which keeps the pattern of the tiles",
        )
    along = sum(-(-layout.length(rank) // tile) for rank in range(layout.P))
    if along > MOST_TILES:
        raise LayoutError(f"at most {MOST_TILES} tiles along a side", f"{along}", "take larger tiles")
    if documents is not None and (sum(documents) != layout.S or min(documents, default=0) < 1):
        raise LayoutError(
            f"documents of at least one token that add up to S={layout.S}", f"{list(documents)}"
        )
