"""Reads and writes quantities with units, such as "450 GB/s", "5 us", "989.4 TFLOP/s", or "1M" for tokens.

Decimal prefixes are powers of 1000 (k, M, G, T, P, E), binary ones powers of 1024 (Ki, Mi, Gi, Ti,
Pi); b is a bit, B a byte. Reading is exact: decimal digits are rounded to the nearest float only once.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction

from ringlab.errors import CostError

DECIMAL = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}
SMALL = {"a": -18, "f": -15, "p": -12, "n": -9, "u": -6, "µ": -6, "μ": -6, "m": -3, "": 0}

UNITS: dict[str, dict[str, Fraction]] = {
    "bytes": {"B": Fraction(1), "b": Fraction(1, 8)},
    "bytes/s": {"B/s": Fraction(1), "b/s": Fraction(1, 8)},
    "FLOP/s": {"FLOP/s": Fraction(1), "FLOPs/s": Fraction(1), "FLOPS": Fraction(1)},
    "seconds": {"s": Fraction(1)},
    "percent": {"%": Fraction(1, 100)},
}
"""The units of each dimension, relative to the unit that values are kept in; a fraction is written in percent."""

EXAMPLES = {
    "bytes": "80 GB",
    "bytes/s": "450 GB/s",
    "FLOP/s": "312 TFLOP/s",
    "seconds": "5 us",
    "percent": "65 %",
}

_COUNTS = (("M", 10**6), ("Mi", 2**20), ("k", 10**3), ("Ki", 2**10))
_NUMBER = re.compile(r"\s*([+-]?[0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,3})?)\s*(\S{0,16})\s*")
_LARGEST = Fraction(10) ** 30


def quantity(text: object, dimension: str) -> float:
    """Return the value of `text` in the unit of `dimension`: bytes, bytes/s, FLOP/s, seconds, or a fraction.

    Raises: CostError for a number without a unit, an unknown unit, a unit of another dimension, or no number.
    """
    needed = f"{dimension} with a unit, such as {EXAMPLES[dimension]!r}"
    if not isinstance(text, str):
        raise CostError(
            needed, f"{shown(text)}, a bare {type(text).__name__}", "write it in quotes with its unit"
        )
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise CostError(needed, shown(text))
    number, unit = found.groups()
    scale = scales(dimension).get(unit)
    if scale is None:
        raise CostError(needed, shown(text), _remedy(unit, dimension))
    return _bounded(Fraction(number) * scale, needed, text)


def tokens(text: str | int, of: str = "") -> int:
    """Return a count of tokens: 1_000_000 for "1M", 2**20 for "1Mi", 131072 for "131072".

    of: the name of the tokens in an error, such as an option.
    Raises: CostError for a fraction of a token, less than one token, or an unknown suffix.
    """
    needed = f'tokens{of and f" for {of}"}, such as "131072", "128Ki" or "1M"'
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise CostError(needed, shown(text), "an integer, or a text")
    found = _NUMBER.fullmatch(str(text).replace("_", "").removesuffix("tokens").rstrip()[:60])
    scale = _prefixes("", Fraction(1), DECIMAL, BINARY).get(found[2]) if found else None
    if found is None or scale is None:
        raise CostError(needed, shown(text), "suffixes: k, M, G are powers of 1000; Ki, Mi, Gi of 1024")
    value = Fraction(found[1]) * scale
    if value.denominator != 1 or not 1 <= value <= 10**15:
        needed = f"{needed}: a whole number from 1 to 10^15"
        raise CostError(needed, shown(text), "1 is the least, 128Ki a usual one")
    return int(value)


def kernel_tile(text: str, most: int, needed: str) -> tuple[int, int]:
    """Return (rows, keys) of a kernel tile: (128, 64) for "128x64".

    Raises: CostError, with `needed`, for another text, or for an edge that is not from 1 to `most`.
    """
    edges = [int(edge) if edge.isdecimal() and len(edge) < 10 else 0 for edge in text.split("x")]
    if len(edges) != 2 or not all(1 <= edge <= most for edge in edges):
        raise CostError(needed, shown(text), "--tile 128x128")
    return edges[0], edges[1]


def written(value: float, dimension: str) -> str:
    """Return `value` with a fitting unit; `quantity` reads it back exactly."""
    if dimension == "percent":
        return f"{_digits(Decimal(repr(float(value))).scaleb(2))} %"
    prefixes = SMALL if dimension == "seconds" else DECIMAL
    unit = next(iter(UNITS[dimension]))
    exact = Decimal(repr(float(value)))
    exponents = sorted({exponent: name for name, exponent in reversed(prefixes.items())}.items())
    exponent, prefix = exponents[0] if exact else (0, "")
    for candidate, name in exponents if exact else ():
        if abs(exact) >= Decimal(10) ** candidate:
            exponent, prefix = candidate, name
    return f"{_digits(exact.scaleb(-exponent))} {prefix}{unit}"


def short(value: float, dimension: str, digits: int = 3) -> str:
    """Return `value` with a fitting unit, rounded to `digits` significant digits for reading."""
    return written(float(f"{value:.{digits}g}"), dimension) if math.isfinite(value) else str(value)


def short_count(n: int) -> str:
    """Return n as a text that `tokens` reads back as exactly n: 1000000 → 1M, 131072 → 128Ki, 131073 → 131073."""
    return next((f"{n // unit}{name}" for name, unit in _COUNTS if n >= unit and n % unit == 0), str(n))


def counted(n: int, thing: str) -> str:
    """Return a count with its noun: 1 sequence, 2 sequences."""
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a time for readers: 0.0123 → 12.3 ms, 332.4 → 332 s, 90000 → 25 hours."""
    for name, unit in (("years", 365.25 * 86400), ("days", 86400.0), ("hours", 3600.0)):
        if seconds >= 2 * unit:
            return f"{seconds / unit:{',.3g' if seconds < 1000 * unit else ',.0f'}} {name}"
    return short(seconds, "seconds")


def in_percent(fraction: float) -> str:
    """Return a fraction in percent, with one decimal if it is below ten percent."""
    return f"{100 * fraction:.1f}%" if abs(fraction) < 0.0995 else f"{100 * fraction:.0f}%"


def scales(dimension: str) -> dict[str, Fraction]:
    """Return the scale of each spelling of a unit of `dimension`, relative to the unit of stored values."""
    if dimension == "percent":
        return dict(UNITS[dimension])
    decimal, binary = (SMALL, {}) if dimension == "seconds" else (DECIMAL, BINARY)
    spellings: dict[str, Fraction] = {}
    for unit, scale in UNITS[dimension].items():
        spellings |= _prefixes(unit, scale, decimal, binary)
    return spellings


def _prefixes(
    unit: str, scale: Fraction, decimal: dict[str, int], binary: dict[str, int]
) -> dict[str, Fraction]:
    spelled = {prefix + unit: scale * Fraction(10) ** power for prefix, power in decimal.items()}
    return spelled | {prefix + unit: scale * 2**power for prefix, power in binary.items()}


def _bounded(value: Fraction, needed: str, text: object) -> float:
    if abs(value) > _LARGEST:
        raise CostError(f"{needed}, at most 10^30", shown(text))
    return float(value)


def _remedy(unit: str, dimension: str) -> str:
    if not unit:
        return f"add the unit: {', '.join(UNITS[dimension])}, with a prefix if you like"
    for other in UNITS:
        if other != dimension and unit in scales(other):
            return f"{unit!r} is a unit of {other}; here {dimension} are due"
    same = [spelling for spelling in scales(dimension) if spelling.casefold() == unit.casefold()]
    return f"mind the case: {' or '.join(same)}" if same else f"units: {', '.join(UNITS[dimension])}"


def _digits(value: Decimal) -> str:
    text = format(value.normalize(), "f")
    return text if len(text) <= 30 else str(value.normalize())


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the known name most similar to `name` as a remedy, or the first known name as an example if none is similar."""
    names = list(known)
    near = difflib.get_close_matches(str(name)[:80].casefold(), names, 1, 0.3)
    return f"nearest: {near[0]}" if near else f"for example {names[0]}"


def shown(value: object) -> str:
    """Return `value` as errors show it, cut to 80 characters."""
    text = (
        repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "an integer of over 30 digits"
    )
    return text if len(text) <= 80 else text[:77] + "…"
