"""Exercise 04: reading what kernels read and wrote, as their interpreter wrote it down."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.failures import Failure

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Recorded

CANARY = -7.0
"""What `out` holds before the call: representable in every dtype, and no answer."""


def named(known: tuple[Misconception, ...], name: str) -> Misconception:
    """Return the misconception called `name`."""
    return next(mistake for mistake in known if mistake.name == name)


def reads_of(recorded: Recorded, argument: str, size: int) -> np.ndarray:
    """Return how often each of the `size` elements of a kernel argument was loaded."""
    return _counted(recorded, "load", argument, size)


def tiles_read(recorded: Recorded, argument: str) -> dict[tuple[int, ...], int]:
    """Return, for every program, how many loads it made of a kernel argument."""
    count: dict[tuple[int, ...], int] = {}
    for access in recorded.accesses:
        if access.kind == "load" and access.argument == argument:
            count[access.program] = count.get(access.program, 0) + 1
    return count


def expect_each_once(
    recorded: Recorded, arguments: Iterable[str], places: np.ndarray, without: Misconception, case: str
) -> None:
    """Raise unless kernels stored each of `places` exactly once into each of the arguments.

    Raises: Failure, as the misconception `without` where a place was never stored.
    """
    for argument in arguments:
        stores = _counted(recorded, "store", argument, int(places.max()) + 1)[places]
        if stores.min() == 0:
            raise without.failure(
                f"{case}: {int((stores == 0).sum())} of {stores.size} places without a store"
            )
        if stores.max() > 1:
            raise Failure(
                "The values are right, but several programs store the same element: on a GPU they run at the same "
                "time, and who is last is chance.",
                f"{case}: {argument.removesuffix('_ptr')} was stored up to {stores.max()} times in one place",
            )


def _counted(recorded: Recorded, kind: str, argument: str, size: int) -> np.ndarray:
    count = np.zeros(size, np.int64)
    for access in recorded.accesses:
        if access.kind == kind and access.argument == argument:
            touched = access.offsets
            np.add.at(count, touched[(touched >= 0) & (touched < size)], 1)
    return count
