"""The exponent by which memory grows with size: the one fitted to readings, and the least that they allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

GRAIN = 1 << 19
"""Bytes by which a reading of a process's peak may be too high or too low.

The reasons are whole pages, small objects, and memory that was freed before and is used again. The measured
error is at most 0.3 MiB for calls that hold between 1 and 64 MiB.
"""
MARGIN = 0.2


@dataclass(frozen=True)
class Growth:
    """Peaks of memory in bytes at several sizes, and the exponent of the size that they imply."""

    sizes: tuple[int, ...]
    peaks: tuple[int, ...]

    @property
    def exponent(self) -> float:
        """The slope of log(peak) over log(size), by least squares."""
        return float(self._weights() @ np.log(np.maximum(self.peaks, 1)))

    @property
    def at_least(self) -> float:
        """The least exponent that is consistent with the readings.

        The slope is a weighted sum of the logarithms of the peaks, with positive weights for the large sizes.
        So the slope is least if the readings at large sizes are too high by GRAIN and those at small sizes
        too low by GRAIN. GRAIN is then added to all of them, because the logarithm of 0 does not exist. A
        program that takes a + b·size^p bytes, with a and b not negative, has a slope of at most p. A larger a
        only lowers the slope, so the result is never above p.
        """
        weights, peaks = self._weights(), np.array(self.peaks, float)
        least = np.where(weights > 0, np.maximum(peaks - GRAIN, 0), peaks + GRAIN)
        return float(weights @ np.log(least + GRAIN))

    def faster_than(self, order: float, wrong: int) -> bool:
        """Return whether memory surely grows faster than size^order, or is so large that it hides such growth.

        wrong: the least bytes that a program of a higher order needs at the largest size. A peak above half
        of these bytes is a fault whatever the exponent, because a program that takes more memory than it
        needs at small sizes has a low exponent.

        If memory is a constant plus a multiple of size^order, `at_least` is never above `order`. MARGIN
        allows for memory of another form, because the scratch space of operators grows in steps.
        """
        return self.at_least > order + MARGIN or self.peaks[-1] > wrong // 2

    def __str__(self) -> str:
        grown = ", ".join(f"S={s}: {p / 2**20:.1f} MiB" for s, p in zip(self.sizes, self.peaks, strict=True))
        return f"{grown}: peak memory grows as S^{self.exponent:.2f}"

    def _weights(self) -> np.ndarray:
        x = np.log(self.sizes)
        x -= x.mean()
        return np.asarray(x / (x @ x))


def keeps_every_block(peaks: Sequence[int], world_size: int, block: int, spare: int = 1) -> bool:
    """Return whether a rank's memory is that of a ring that keeps every block of `block` bytes.

    `peaks` are the peaks on few ranks and on `world_size` ranks. The second may exceed the first by `spare`
    blocks. It must also be less than all the blocks that a rank receives, because growth is hidden if the
    ring takes more memory than it needs on few ranks.
    """
    few, many = peaks
    return many > few + spare * block or many >= (world_size - 1) * block


def measured(sizes: Sequence[int], peak: Callable[[int], int], order: float, wrong: int) -> Growth:
    """Return the growth of `peak(size)` bytes.

    If the growth seems faster than `order` (`Growth.faster_than`), each peak is read again and the lower reading is taken. Chance
    effects (an import at the first call, the garbage collector) only ever add memory.
    """
    first = Growth(tuple(sizes), tuple(map(peak, sizes)))
    if not first.faster_than(order, wrong):
        return first
    return Growth(first.sizes, tuple(map(min, first.peaks, map(peak, sizes))))
