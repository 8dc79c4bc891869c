"""Score elements by rank and step: counted tile by tile where that is quick, else by formula.

The formulas, with shards of L tokens and kernel tiles of m × n, T(x) being the tiles that are not wholly
masked of a causal square of x: contiguous T(L) for a rank's own block, L² for earlier ones, 0 for later
ones; striped T(L) for all; zig-zag, two pieces of x = L/2, x² + 2·T(x) for its own and 2·x² for all others.
They equal the count where tiles divide the pieces and all pieces are alike; else they differ by the
tiles that hold the end of one piece and the beginning of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from ringlab.cost.flops import layout_work
from ringlab.layout import get_layout

FORMULAS: dict[str, Callable[[int, int], tuple[int, int, int]]] = {
    "contiguous": lambda x, triangle: (triangle, x * x, 0),
    "striped": lambda x, triangle: (triangle, triangle, triangle),
    "zigzag": lambda x, triangle: (x * x + 2 * triangle, 2 * x * x, 2 * x * x),
}
"""By layout: the work on a rank's own block, on an earlier one and on a later one."""
MOST_COUNTED = 2**17  # tokens: counting these takes milliseconds
LONGEST_COUNTED = 2**22  # tokens of a layout without a formula: a second


@lru_cache(maxsize=512)
def ring_work(layout: str, S: int, P: int, causal: bool, tile: tuple[int, int]) -> tuple[np.ndarray, int]:
    """Return the score elements of one head by (rank, step), and the tokens of the largest shard.

    The table has P rows, or one row where all ranks have the same work.
    """
    if S * max(1, P // 16) <= MOST_COUNTED:
        return counted(layout, S, P, causal, tile)
    if layout in FORMULAS:
        return by_formula(layout, S, P, causal, tile)
    return _scaled(layout, S, P, causal, tile)


def counted(layout: str, S: int, P: int, causal: bool, tile: tuple[int, int]) -> tuple[np.ndarray, int]:
    """Return the same, counted tile by tile."""
    dealt = get_layout(layout, S, P)
    work = layout_work(dealt, causal, tile)
    alike = bool((work == work[0]).all())
    return work[:1] if alike else work, max(dealt.length(rank) for rank in range(P))


def _scaled(layout: str, S: int, P: int, causal: bool, tile: tuple[int, int]) -> tuple[np.ndarray, int]:
    """Count a shorter sequence if S is very long: work grows as S², but for the tiles that are partly masked."""
    times = max(1.0, S / LONGEST_COUNTED)
    work, tokens = counted(layout, min(S, LONGEST_COUNTED), P, causal, tile)
    return np.rint(work * times**2).astype(np.int64), math.ceil(tokens * times)


def by_formula(layout: str, S: int, P: int, causal: bool, tile: tuple[int, int]) -> tuple[np.ndarray, int]:
    """Return the same by the formulas above, for layouts that have one."""
    pieces = 2 if layout == "zigzag" and P > 1 else 1
    piece = -(-S // (pieces * P))
    if not causal:
        return np.full((1, P), (pieces * piece) ** 2, dtype=np.int64), pieces * piece
    formula = FORMULAS[layout if P > 1 else "contiguous"]
    own, earlier, later = formula(piece, staircase(piece, tile))
    ranks = np.arange(1 if earlier == later else P)[:, None]
    steps = np.arange(P)[None, :]
    work = np.where(steps == 0, own, np.where(steps <= ranks, earlier, later))
    return work.astype(np.int64), pieces * piece


def staircase(x: int, tile: tuple[int, int]) -> int:
    """Return the elements of the tiles that are not wholly masked in a causal square of x rows."""
    rows, keys = tile
    if rows == keys:
        whole, rest = divmod(x, rows)
        return whole * (whole + 1) // 2 * rows * rows + rest * x
    last = np.minimum(np.arange(rows, x + rows, rows), x)
    heights = np.diff(last, prepend=0)
    return int((heights * np.minimum(-(-last // keys) * keys, x)).sum())
