"""Checks of 17.window: a sliding window over global positions, without hops whose blocks no device needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringlab.layout import contiguous, zigzag
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e17_ring_in_jax.cases import (
    Case,
    Parts,
    case,
    expect_values,
    furthest,
    look,
    sees,
    verify,
    walk,
)

mistake = mistakes_of("17.window")

L = 4


def _ring(**how: Any) -> Callable[[Case], Parts]:
    return lambda given: walk(given, **how)


def _by_age(seen: Callable[[np.ndarray, int], np.ndarray]) -> Callable[[Case], Parts]:
    """Return a ring with the mask `seen(ages, window)`; an age is the query's position minus the key's."""

    def mask(given: Case, rank: int, origin: int) -> np.ndarray:
        return seen(given.positions[rank][:, None] - given.positions[origin], given.window or 0)

    return _ring(mask=mask)


def _inside(given: Case, rank: int, origin: int) -> np.ndarray:
    """Return a mask in which the window is applied to places inside blocks, but causality to positions.

    Raises: ValueError if the window is as long as a block, so that it hides nothing.
    """
    if given.length <= (given.window or 0):
        raise ValueError("a window as long as a block hides nothing inside of blocks")
    return _by_places(given, rank, origin)


def _by_places(given: Case, rank: int, origin: int) -> np.ndarray:
    own = np.arange(given.length)
    return _no_later_key(given, rank, origin) & (abs(own[:, None] - own) < (given.window or 0))


def _no_later_key(given: Case, rank: int, origin: int) -> np.ndarray:
    return given.positions[rank][:, None] >= given.positions[origin]


def _needed(given: Case) -> range:
    """Return the steps that at least one device needs."""
    return range(furthest(given.positions, given.window) + 1)


def _not_after_the_window(given: Case, rank: int, origin: int) -> np.ndarray:
    """Return a mask that hides keys that are too old, but not later keys."""
    return given.positions[rank][:, None] - given.positions[origin] < (given.window or 0)


def of_contiguous(given: Case) -> range:
    """Return the steps that a contiguous layout needs."""
    return range(min(given.ranks, -(-((given.window or 1) - 1) // given.length) + 1))


def _of_the_first(given: Case) -> range:
    """Return the steps that device 0 needs."""
    mask = sees(given.window)
    needed = [
        s for s in range(given.ranks) if mask(given.positions[0], given.positions[-s % given.ranks]).any()
    ]
    return range(max(needed) + 1)


def _fewer(given: Case) -> range:
    return range(max(1, len(of_contiguous(given)) - 1))


def _skips(given: Case) -> Parts:
    """Return a ring that does not hop in steps that no device needs, so that its blocks come too late."""
    P, mask, hops = given.ranks, sees(given.window), {0: 0}
    for step in range(1, P):
        rows = given.positions, np.roll(given.positions, step, axis=0)
        if any(mask(queries, keys).any() for queries, keys in zip(*rows, strict=True)):
            hops[step] = len(hops)
    return walk(given, steps=lambda given: hops, here=lambda rank, step, P: (rank - hops[step]) % P)


MISTAKES = (
    mistake("no_window", _by_age(lambda age, window: age >= 0)),
    mistake("one_key_more", _by_age(lambda age, window: (age >= 0) & (age <= window))),
    mistake("no_lower_mask", _by_age(lambda age, window: age < window)),
    mistake("both_sides", _by_age(lambda age, window: abs(age) < window)),
    mistake("window_inside_blocks", _ring(mask=_inside)),
    mistake("a_hop_too_few", _ring(steps=_fewer)),
    mistake("asks_one_device", _ring(steps=_of_the_first)),
    mistake("stops_by_contiguous", _ring(steps=of_contiguous)),
    mistake("skips_steps", _skips),
    mistake("lets_all_travel"),
    mistake("a_hop_too_many"),
    mistake("hull_of_the_positions"),
)  # fmt: skip
NAMED = {each.name: each for each in MISTAKES}
IMITATED = (
    *MISTAKES,
    mistake("no_lower_mask", _ring(mask=_not_after_the_window, steps=_needed)),
    mistake("no_window", _ring(mask=_no_later_key, steps=_needed)),
    mistake("window_inside_blocks", _ring(mask=_by_places, steps=_needed)),
)
"""All mistakes with imitations. A mistake that can be made in two ways is listed twice."""


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    """Check answers for a window that reaches two blocks back, and for near chunks on distant devices.

    In the second layout all mistakes differ from each other.
    """
    near, far, farther = contiguous(L * 5, 5), zigzag(L * 4, 4), zigzag(L * 5, 5)
    asked = ((near, 6), (far, 3), (farther, 3))
    verify(subject, [case(rng, deal, window=window) for deal, window in asked], IMITATED)


def _count(subject: Any, given: Case, otherwise: str = "") -> None:
    """Raise Failure if blocks travel that no device needs.

    otherwise: the mistake to report if no other mistake is possible.
    """
    found, needed = look(subject, given, NAMED), furthest(given.positions, given.window)
    example = f"{given.text}: {found.messages} messages of a device, {found.blocks:g} blocks; {2 * needed} are enough"
    if found.others:
        raise Failure("The compiled program has a collective that brings all blocks to all devices.", example)
    if found.blocks <= 2 * needed and found.messages <= 2 * needed:
        expect_values(found, given)
        return
    if otherwise:
        raise NAMED[otherwise].failure(example)
    if found.blocks >= 2 * (given.ranks - 1) > 2 * (needed + 1):
        raise NAMED["lets_all_travel"].failure(example)
    if found.blocks == 2 * (needed + 1):
        raise NAMED["a_hop_too_many"].failure(example)
    raise Failure("The compiled program sends more blocks than any device needs.", example)


def _check_sends(subject: Any, rng: np.random.Generator) -> None:
    _count(subject, case(rng, contiguous(L * 5, 5), window=6))


def _edges(rng: np.random.Generator) -> list[Case]:
    """Return a window that ends at a block's edge, and a layout that is not contiguous but needs few hops."""
    turned = np.roll(np.arange(L * 4).reshape(4, L), 1, axis=0)
    return [
        case(rng, contiguous(L * 4, 4), window=L + 1),
        case(rng, turned, "contiguous, begun at device 1", window=L),
    ]


def _cyclic(rng: np.random.Generator) -> Case:
    """Return a case with two distant chunks on each device. Tokens of all other devices lie between the two.

    The later chunk comes first. So neither the range of a device's positions nor its first and last entry
    shows which tokens are near.
    """
    chunks = np.arange(L * 4).reshape(2, 4, 2)
    return case(rng, np.concatenate([chunks[1], chunks[0]], axis=1), "block-cyclic", window=2)


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on windows that end at a block's edge, and devices with two distant chunks."""
    verify(subject, [*_edges(rng), _cyclic(rng)], IMITATED)


def _check_edges(subject: Any, rng: np.random.Generator) -> None:
    for given in _edges(rng):
        _count(subject, given)
    # An answer whose number of hops is wrong in other cases has already failed in the checks above.
    _count(subject, _cyclic(rng), "hull_of_the_positions")


STAGE = Stage(
    id="17.window",
    function="window_ring",
    title="A window, and no hop too many",
    kind="mesh",
    helpers=("ring_forward",),
    hints=(
        "All devices make the same hops. For which steps does at least one device see a key of the block that has come to it?",
        "`positions` and `window` are known while JAX traces. Ask with NumPy, for each step and each rank: is any 0 ≤ positions[rank][:, None] − "
        "positions[(rank − step) % P] < window? The number of hops is the largest step for which some rank says yes. The mask needs the window, too.",
        r"$\text{hops} = \max\{\,s : \exists\, r, i, j: \; 0 \le \mathrm{pos}_r[i] - \mathrm{pos}_{(r-s) \bmod P}[j] < w\,\}$",
    ),
    misconceptions=MISTAKES,
    checks=(
        Check("values", 2, "visible", "values with a window: contiguous, P = 5, and zig-zag, P = 4 and 5", _check_values),
        Check("sends", 2, "visible", "no hop that nobody needs: 2 of 4", _check_sends, kind="cost"),
        Check("layouts", 2, "stress", "values in other layouts, and with windows that end at a block's edge", _check_layouts),
        Check("edges", 1, "held-out", "no hop that nobody needs, at a block's edge and in any layout", _check_edges, kind="cost"),
    ),
)  # fmt: skip
