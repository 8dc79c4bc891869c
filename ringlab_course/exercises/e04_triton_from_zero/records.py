"""Exercise 04: recorded loads and stores of the attention kernels, and common mistakes in these kernels.

Mistakes are tested in the order in which they are listed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.failures import Failure

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Recorded

from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e04_triton_from_zero import address_mistakes as places
from ringlab_course.exercises.e04_triton_from_zero import flash_mistakes as mistakes
from ringlab_course.exercises.e04_triton_from_zero.flash_mistakes import end_of

CANARY = -7.0
"""The number that fills `out` before the call. Every dtype represents it, and it is no right answer."""


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


def empty_loads(recorded: Recorded, argument: str) -> int:
    """Return how many loads of a kernel argument touched no element because all their lanes were masked."""
    return sum(
        access.kind == "load" and access.argument == argument and not access.offsets.size
        for access in recorded.accesses
    )


def expect_each_once(
    recorded: Recorded, arguments: Iterable[str], places: np.ndarray, without: Misconception, case: str
) -> None:
    """Raise unless kernels stored each of `places` exactly once into each of the arguments.

    Raises: Failure, named after the misconception `without` if a place was never stored.
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


causal_mistake = mistakes_of("04.causal")
flash_mistake = mistakes_of("04.flash")

_COMMON = (
    flash_mistake("no_scale", mistakes.no_scale),
    flash_mistake("not_transposed", mistakes.not_transposed),
    flash_mistake("exp2_without_log2e", mistakes.changed(mistakes.base_two)),
    flash_mistake("acc_not_rescaled", mistakes.streamed(mistakes.rescaled(total=True, acc=False))),
    flash_mistake("total_not_rescaled", mistakes.streamed(mistakes.rescaled(total=False, acc=True))),
    flash_mistake("never_rescaled", mistakes.streamed(mistakes.rescaled(total=False, acc=False))),
    flash_mistake("not_divided", mistakes.streamed(mistakes.rescaled(total=True, acc=True), divide=False)),
    flash_mistake("divided_each_time", mistakes.streamed(mistakes.divided_each_time, divide=False)),
    flash_mistake("maximum_of_the_tile", mistakes.streamed(mistakes.maximum_of_the_tile)),
    flash_mistake("no_maximum", mistakes.no_maximum),
    flash_mistake("no_other", mistakes.no_other),
    flash_mistake("head_stride_is_S", places.head_stride_is_s),
    flash_mistake("one_head_of_each_group", places.one_head_of_each_group),
    flash_mistake("heads_dealt", places.heads_dealt),
    flash_mistake("one_key_head", places.one_key_head),
    flash_mistake("packed_rows_cut", places.packed_rows_cut),
    flash_mistake("tail_dropped", mistakes.tail_dropped),
    flash_mistake("padding_counted", mistakes.padding_counted),
    flash_mistake("padding_read", mistakes.padding_read),
    flash_mistake("axes_swapped", places.axes_swapped),
    flash_mistake("accumulates_in_half", mistakes.in_half),
    flash_mistake("junk_times_zero", mistakes.junk_times_zero),
    flash_mistake("q_loaded_again"),
    flash_mistake("reads_unmasked"),
)

FLASH = (
    *_COMMON,
    flash_mistake("stores_unmasked"),
    flash_mistake("computed_by_torch"),
    flash_mistake("heads_read_apart"),
    flash_mistake("reads_past_the_end"),
    flash_mistake("reads_too_often"),
)

_HEAD_STRIDE = named(FLASH, "head_stride_is_S")
_BY_PACKED_ROW = causal_mistake("mask_by_packed_row", mistakes.masked(mistakes.by_packed_row))
_BLIND = causal_mistake("blind_rows_are_nan", mistakes.blind_rows_nan)
_FINITE = causal_mistake("hidden_is_finite", mistakes.hidden_is_finite(math.nan))

CAUSAL = (
    causal_mistake("mask_ignored", mistakes.masked(lambda rows, keys, S, *_: keys < S)),
    causal_mistake(
        "mask_upside_down", mistakes.masked(lambda rows, keys, S, shift, *_: keys >= rows + shift)
    ),
    causal_mistake("strictly_before", mistakes.masked(lambda rows, keys, S, shift, *_: keys < rows + shift)),
    causal_mistake("shift_ignored", mistakes.masked(lambda rows, keys, *_: keys <= rows)),
    causal_mistake("shift_backwards", mistakes.masked(mistakes.shift_backwards)),
    _BY_PACKED_ROW,
    causal_mistake("mask_within_the_tile", mistakes.masked(mistakes.within_the_tile)),
    causal_mistake(
        "tiles_rounded_down",
        mistakes.up_to(lambda block, shift, m, n, group: (end_of(block, group, m) + shift) // n * n),
    ),
    causal_mistake(
        "diagonal_tile_missing", mistakes.up_to(lambda block, shift, m, n, group: block * m // group + shift)
    ),
    causal_mistake(
        "ends_one_key_early",
        mistakes.up_to(lambda block, shift, m, n, group: end_of(block, group, m) - 1 + shift),
    ),
    causal_mistake(
        "assumes_equal_blocks",
        mistakes.up_to(lambda block, shift, m, n, group: end_of(block, group, n) + shift),
    ),
    causal_mistake(
        "stop_ignores_shift", mistakes.up_to(lambda block, shift, m, n, group: end_of(block, group, m))
    ),
    _BLIND,
    _FINITE,
    causal_mistake("blind_blocks_unwritten", mistakes.blind_blocks_unwritten),
    causal_mistake("padding_seen", mistakes.padding_counted),
    *(mistake for mistake in _COMMON if mistake.name != "padding_counted"),  # here it is padding_seen
    causal_mistake("stores_unmasked"),
    causal_mistake("computed_by_torch"),
    causal_mistake("visits_hidden_tiles"),
    causal_mistake("visits_the_first_tile"),
    causal_mistake("stops_at_the_packed_row"),
    causal_mistake("last_token_not_there"),
    causal_mistake("heads_read_apart"),
    causal_mistake("reads_past_the_end"),
    causal_mistake("reads_too_often"),
)

FLASH_VARIANTS = (replace(_HEAD_STRIDE, imitate=places.query_stride_is_s),)
CAUSAL_VARIANTS = (
    *FLASH_VARIANTS,
    replace(_FINITE, imitate=mistakes.hidden_is_finite(0.0)),
    replace(_BLIND, imitate=mistakes.visited_blind_rows_nan),
    replace(_BY_PACKED_ROW, imitate=mistakes.masked(mistakes.by_packed_row_in_seen_tiles)),
)
"""Milder forms of the mistakes above.

In each of them the loop has the right length, a sum of 0 is guarded, or the key heads are right.
"""

LSE = (
    flash_mistake("lse_in_base_two", mistakes.lse_of(mistakes.lse_in_base_two)),
    flash_mistake("lse_by_log2", mistakes.lse_of(mistakes.lse_by_log2)),
    flash_mistake("lse_is_the_maximum", mistakes.lse_of(mistakes.lse_is_the_maximum)),
    flash_mistake("lse_without_maximum", mistakes.lse_of(mistakes.lse_without_maximum)),
    flash_mistake("lse_stride_is_S", places.lse_stride_is_s),
)
