"""Find places for labels in a picture: inside the regions of a map, or at heights where no two overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np
from jaxtyping import Bool

Region = Bool[np.ndarray, "rows columns"]


def room_for(text: str, mask: Region, width: float, height: float) -> tuple[int, int] | None:
    """Return the (column, row) at which `text` has the most space around it inside a region, or None.

    width, height: the size of the map in inches.
    """
    rows, columns = mask.shape
    high, wide = round(0.35 / height * rows), round((0.085 * len(text) + 0.2) / width * columns)
    for grown in range(max(rows, columns), -1, -2):  # the margin around the text: the largest that fits
        h, w = high + grown, wide + grown
        if h > rows or w > columns:
            continue
        total = np.pad(mask.astype(int), ((1, 0), (1, 0))).cumsum(0).cumsum(1)
        inside = total[h:, w:] - total[:-h, w:] - total[h:, :-w] + total[:-h, :-w] == h * w
        if inside.any():
            found = np.argwhere(inside)
            row, column = found[len(found) // 2]
            return int(column + w // 2), int(row + h // 2)
    return None


def middle(mask: Region) -> tuple[int, int] | None:
    """Return the (column, row) in the middle of a strip, at the place where the strip is widest over five rows.

    Return None if the strip is too narrow everywhere.
    """
    five = np.array([mask[row : row + 5].all(axis=0) for row in range(len(mask) - 4)])
    wide = five.sum(axis=1)
    if wide.max() < 3:
        return None
    fitting = np.flatnonzero(wide == wide.max())
    row = int(fitting[len(fitting) // 2])
    return int(np.median(np.flatnonzero(five[row]))), row + 2


def apart(values: Sequence[float], factor: float = 2.6) -> list[float]:
    """Return heights for labels, near their values, in the same order and at least `factor` apart.

    Labels that would overlap are spread around the mean of their values.
    """
    order, room = sorted(range(len(values)), key=lambda i: -values[i]), math.log(factor)
    crowds: list[list[float]] = []
    for place, i in enumerate(order):
        # With the room of each label subtracted, heights only have to decrease. Neighbours whose heights
        # increase are joined into one crowd around their mean.
        crowds.append([math.log(values[i]) + place * room])
        while len(crowds) > 1 and fmean(crowds[-2]) < fmean(crowds[-1]):
            crowds[-2:] = [crowds[-2] + crowds[-1]]
    heights = list(values)
    for place, (i, middle) in enumerate(zip(order, (fmean(c) for c in crowds for _ in c), strict=True)):
        heights[i] = math.exp(middle - place * room)
    return heights
