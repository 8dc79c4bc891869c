"""How many score elements every rank computes in every step, as numbers and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringlab.cost.flops import layout_work, slowest_per_step
from ringlab.errors import LayoutError
from ringlab.layout import Layout

MOST_RANKS = 64
"""Ranks that can be drawn at all."""


@dataclass(frozen=True)
class Mosaic:
    """The work of one layout, score elements: work[rank, step] and what an even split would be per rank."""

    layout: Layout
    tile: tuple[int, int] | None
    work: np.ndarray
    even: float

    @property
    def slowest(self) -> np.ndarray:
        """Return the most that any rank computes in each step: (P,)."""
        return slowest_per_step(self.work)

    @property
    def totals(self) -> np.ndarray:
        """Return what each rank computes in all steps: (P,)."""
        return self.work.sum(axis=1)

    @property
    def ratio(self) -> float:
        """Return the sum over steps of the slowest rank's work, over the even split."""
        return float(self.slowest.sum() / self.even) if self.even else 1.0

    def by_origin(self) -> np.ndarray:
        """Return the work by (rank, owner of the keys) in place of (rank, step)."""
        ranks = np.arange(self.layout.P)
        return self.work[ranks[:, None], (ranks[:, None] - ranks[None, :]) % self.layout.P]


def mosaic(layout: Layout, tile: int | tuple[int, int] | None = None, *, causal: bool = True) -> Mosaic:
    """Return the work of `layout` per rank and step, and the even split of the visible pairs.

    `tile` (an integer, or rows and keys) counts every tile that is not wholly masked as a whole.
    Raises: LayoutError above 64 ranks; CostError for a tile below one.
    """
    if layout.P > MOST_RANKS:
        raise LayoutError(f"at most {MOST_RANKS} ranks in a picture", f"{layout.P}", "draw a smaller ring")
    sides = (tile, tile) if isinstance(tile, int) else tile
    even = float(layout_work(layout, causal).sum()) / layout.P
    return Mosaic(layout, sides, layout_work(layout, causal, sides), even)


def mosaics(
    layouts: Layout | Sequence[Layout], tile: int | tuple[int, int] | None, causal: bool
) -> list[Mosaic]:
    """Return one mosaic for each layout, at least one."""
    many = [layouts] if isinstance(layouts, Layout) else list(layouts)
    if not many:
        raise LayoutError("at least one layout", "none")
    return [mosaic(layout, tile, causal=causal) for layout in many]


def describe(
    layouts: Layout | Sequence[Layout], tile: int | tuple[int, int] | None = None, *, causal: bool = True
) -> str:
    """Return the mosaics in words: the alternative text."""
    return " ".join(_sentence(one) for one in mosaics(layouts, tile, causal))


def describe_step(
    layouts: Sequence[Layout], step: int, tile: int | tuple[int, int] | None = None, *, causal: bool = True
) -> str:
    """Return one step of several layouts in words."""
    words = [f"Step {step}."]
    for one in mosaics(layouts, tile, causal):
        work, most = one.work[:, step], int(one.slowest[step])
        if (work == most).all():
            words.append(f"{one.layout.name}: all ranks compute {most:,}, nobody waits.")
            continue
        slow = [rank for rank in range(one.layout.P) if work[rank] == most]
        idle = 1 - work.sum() / (most * one.layout.P)
        who = f"rank {slow[0]} computes" if len(slow) == 1 else f"ranks {', '.join(map(str, slow))} compute"
        words.append(f"{one.layout.name}: {who} {most:,}; the ranks together idle {idle:.0%} of the step.")
    return " ".join(words)


def _sentence(one: Mosaic) -> str:
    P, most, least = one.layout.P, int(one.totals.argmax()), int(one.totals.argmin())
    tile = "visible pairs" if one.tile is None else f"tiles of {one.tile[0]} × {one.tile[1]}"
    maxima = ", ".join(f"{value:,}" for value in one.slowest[:16]) + (", …" if P > 16 else "")
    return (
        f"{one.layout.name}, {one.layout.S:,} tokens on {P} ranks, score elements counted as {tile}: "
        f"rank {most} computes most, {one.totals[most]:,}, rank {least} least, {one.totals[least]:,}. "
        f"The slowest rank of each step computes {maxima}: {one.slowest.sum():,} together, where an even split "
        f"of the visible pairs is {one.even:,.0f}: {one.ratio:.2f} times as much."
    )
