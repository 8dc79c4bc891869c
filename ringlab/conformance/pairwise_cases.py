"""Tables of cases that cover every pair of values of two axes, chosen greedily and deterministically."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

Axes = Mapping[str, tuple[Any, ...]]
Chosen = Mapping[str, Any]
Fits = Callable[[Chosen], bool]
Pair = tuple[tuple[str, Any], ...]


def covering_pairs(
    axes: Axes, fits: Fits = lambda chosen: True, covered: Collection[Chosen] = ()
) -> list[dict[str, Any]]:
    """Return combinations with a value for each axis that contain every pair of values of two axes.

    fits: whether values of some axes may stand together. A pair that does not fit, or that no combination can
    contain, is left out. covered: combinations whose pairs need not be contained again.

    >>> covering_pairs({"P": (1, 2), "dtype": ("float32",)})
    [{'P': 1, 'dtype': 'float32'}, {'P': 2, 'dtype': 'float32'}]
    """
    names = list(axes)
    missing = {pair for pair in _pairs_to_cover(axes) if fits(dict(pair))}
    for made in covered:
        missing -= {*pairs_in(axes, made)}
    found: list[dict[str, Any]] = []
    while missing:
        seed = min(missing, key=lambda pair: tuple(_order(axes, name, value) for name, value in pair))
        gain = partial(_gain, names, missing)
        row = completed(axes, fits, dict(seed), gain) or completed(axes, fits, dict(seed))
        if row is not None:
            found.append(row)
            missing -= {*pairs_in(axes, row)}
        missing.discard(seed)
    return found


def completed(
    axes: Axes, fits: Fits, some: Chosen, gain: Callable[[Chosen, str, Any], int] = lambda *_: 0
) -> dict[str, Any] | None:
    """Return these values with one for each other axis, or None if no value of some axis fits.

    gain: how good a value is together with those chosen so far. Of equally good values, the first is taken.
    """
    chosen = dict(some)
    for name, values in axes.items():
        if name not in chosen:
            fitting = [value for value in values if fits({**chosen, name: value})]
            if not fitting:
                return None
            chosen[name] = max(fitting, key=lambda value: gain(chosen, name, value))
    return {name: chosen[name] for name in axes}


def pairs_in(axes: Axes, row: Chosen) -> Iterator[Pair]:
    """Yield every pair of values in a combination."""
    return itertools.combinations([(name, row[name]) for name in axes], 2)


def _pairs_to_cover(axes: Axes) -> Iterator[Pair]:
    for a, b in itertools.combinations(axes, 2):
        for x, y in itertools.product(axes[a], axes[b]):
            yield (a, x), (b, y)


def _gain(names: list[str], missing: set[Pair], chosen: Chosen, name: str, value: Any) -> int:
    """Return how many uncovered pairs `value` makes with the values chosen so far."""
    met = 0
    for other, its in chosen.items():
        pair = ((other, its), (name, value))
        met += (pair if names.index(other) < names.index(name) else pair[::-1]) in missing
    return met


def _order(axes: Axes, name: str, value: Any) -> tuple[int, int]:
    return list(axes).index(name), axes[name].index(value)
