"""Tables of cases that cover every pair of values of two axes, chosen greedily and deterministically."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Axes = Mapping[str, tuple[Any, ...]]
Pair = tuple[tuple[str, Any], ...]


def covering_pairs(
    axes: Axes, fits: Callable[[Mapping[str, Any]], bool] = lambda chosen: True
) -> list[dict[str, Any]]:
    """Return combinations with a value for each axis that contain every pair of values of two axes.

    fits: whether values of some axes may be combined. A pair that does not fit is left out. The first value
    of each axis must fit all values of other axes.

    >>> covering_pairs({"P": (1, 2), "dtype": ("float32",)})
    [{'P': 1, 'dtype': 'float32'}, {'P': 2, 'dtype': 'float32'}]
    """
    names = list(axes)
    missing = {pair for pair in _pairs_to_cover(axes) if fits(dict(pair))}
    found: list[dict[str, Any]] = []
    while missing:
        seed = min(missing, key=lambda pair: tuple(_order(axes, name, value) for name, value in pair))
        chosen = dict(seed)
        for name in names:
            if name not in chosen:
                fitting = [value for value in axes[name] if fits({**chosen, name: value})]
                chosen[name] = max(fitting, key=lambda value: _gain(names, missing, chosen, name, value))
        found.append({name: chosen[name] for name in names})
        missing -= set(itertools.combinations(found[-1].items(), 2))
    return found


def _pairs_to_cover(axes: Axes) -> Iterator[Pair]:
    for a, b in itertools.combinations(axes, 2):
        for x, y in itertools.product(axes[a], axes[b]):
            yield (a, x), (b, y)


def _gain(names: list[str], missing: set[Pair], chosen: dict[str, Any], name: str, value: Any) -> int:
    """Return how many uncovered pairs `value` makes with the values chosen so far."""
    met = 0
    for other, its in chosen.items():
        pair = ((other, its), (name, value))
        met += (pair if names.index(other) < names.index(name) else pair[::-1]) in missing
    return met


def _order(axes: Axes, name: str, value: Any) -> tuple[int, int]:
    return list(axes).index(name), axes[name].index(value)
