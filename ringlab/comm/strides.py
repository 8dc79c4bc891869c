"""The strides that make a ring visit all ranks."""

from __future__ import annotations

from math import gcd


def strides(world_size: int) -> tuple[int, ...]:
    """Return the strides of the rings that visit all ranks. 1 and P − 1, to the neighbours, are first.

    >>> strides(8)
    (1, 7, 3, 5)
    """
    found = (stride for stride in range(1, world_size) if gcd(stride, world_size) == 1)
    return tuple(sorted(found, key=lambda stride: (min(stride, world_size - stride), stride))) or (1,)
