"""Numbers as people read them, and as the command line takes them back."""

from __future__ import annotations

from ringlab.cost.hardware import hardware_names
from ringlab.cost.units import short

_COUNTS = (("M", 10**6), ("Mi", 2**20), ("k", 10**3), ("Ki", 2**10))


def short_count(n: int) -> str:
    """Return n as a text that reads back as exactly n: 1000000 → 1M, 131072 → 128Ki, 131073 → 131073."""
    for suffix, unit in _COUNTS:
        if n >= unit and n % unit == 0:
            return f"{n // unit}{suffix}"
    return str(n)


def counted(n: int, thing: str) -> str:
    """Return a count with its noun: 1 sequence, 2 sequences."""
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def label(name: str) -> str:
    """Return a name of hardware as a sentence shows it: H100, TPU-V4; words and users' own names stay as they are."""
    return name.upper() if name in hardware_names() and any(map(str.isdigit, name)) else name


def duration(seconds: float) -> str:
    """Return a time as people say it: 0.0123 → 12.3 ms, 332.4 → 332 s, 90000 → 25 hours."""
    for name, unit in (("years", 365.25 * 86400), ("days", 86400.0), ("hours", 3600.0)):
        if seconds >= 2 * unit:
            return (
                f"{seconds / unit:,.3g} {name}" if seconds < 1000 * unit else f"{seconds / unit:,.0f} {name}"
            )
    return short(seconds, "seconds")


def recomputation_words(recomputation: str) -> str:
    """Return the recomputation in words: "no recomputation", "full recomputation"."""
    return f"{'no' if recomputation == 'none' else recomputation} recomputation"


def in_percent(fraction: float) -> str:
    """Return a fraction in percent, with a digit after the point below ten."""
    return f"{100 * fraction:.1f}%" if abs(fraction) < 0.0995 else f"{100 * fraction:.0f}%"
