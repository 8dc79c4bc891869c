"""How memory grows: an exponent fitted over sizes, and the least exponent that the readings allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

GRAIN = 1 << 19
"""Bytes by which a reading of a process's peak may be off, either way: whole pages, memory freed before and
used again, small objects. Measured: at most 0.3 MiB for calls that hold between 1 and 64 MiB."""
MARGIN = 0.2


@dataclass(frozen=True)
class Growth:
    """Peaks in bytes at some sizes, with what they say of the exponent of size."""

    sizes: tuple[int, ...]
    peaks: tuple[int, ...]

    @property
    def exponent(self) -> float:
        """The slope of log peak over log size, by least squares."""
        return float(self._weights() @ np.log(np.maximum(self.peaks, 1)))

    @property
    def at_least(self) -> float:
        """The least exponent that the readings allow.

        The slope is a sum of the peaks' logarithms, the large sizes with positive weights; so it is least where
        they read too much by GRAIN and the small ones too little. GRAIN is then added to all, as a
        logarithm cannot take 0. A program that takes a + b·size^p bytes, with a and b not negative,
        has a slope of p at most, and so has one with a larger a: it can never be found above p.
        """
        weights, peaks = self._weights(), np.array(self.peaks, float)
        least = np.where(weights > 0, np.maximum(peaks - GRAIN, 0), peaks + GRAIN)
        return float(weights @ np.log(least + GRAIN))

    def faster_than(self, order: float) -> bool:
        """Whether memory surely grows faster than size^order.

        `at_least` cannot be above `order` where memory is a constant and that power. MARGIN is for what
        is neither: scratch space of operators, which comes in steps.
        """
        return self.at_least > order + MARGIN

    def __str__(self) -> str:
        grown = ", ".join(f"S={s}: {p / 2**20:.1f} MiB" for s, p in zip(self.sizes, self.peaks, strict=True))
        return f"{grown}: peak memory grows as S^{self.exponent:.2f}"

    def _weights(self) -> np.ndarray:
        x = np.log(self.sizes)
        x -= x.mean()
        return np.asarray(x / (x @ x))


def measured(sizes: Sequence[int], peak: Callable[[int], int], order: float) -> Growth:
    """Return the growth of `peak(size)` bytes; read twice, and the lower taken, where it seems faster than `order`.

    Chance (an import at the first call, the collector of garbage) only ever adds.
    """
    first = Growth(tuple(sizes), tuple(map(peak, sizes)))
    if not first.faster_than(order):
        return first
    return Growth(first.sizes, tuple(map(min, first.peaks, map(peak, sizes))))
