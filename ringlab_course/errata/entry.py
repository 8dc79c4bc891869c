"""One entry of the errata: the values of a published claim, the computed values, and where the two differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

Values = Mapping[str, Any]
ROUNDING = 1e-12
"""Smaller values are printed as "below" this number, because their digits differ between machines."""


@dataclass(frozen=True)
class Figure:
    """One row of an entry's table.

    key: the name of the computed value. claimed: the published value, (least, most) for a range, or None if
    no value was published. holds: whether the claimed value is right. form: the format in which values are
    printed.
    """

    key: str
    label: str
    claimed: Any = None
    form: str = "{:,}"
    holds: bool = False

    def shown(self, value: Any) -> str:
        """Return a value as the page prints it."""
        if value is None:
            return "–"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, float) and 0 < abs(value) < ROUNDING:
            return f"below {ROUNDING:g}"
        return value if isinstance(value, str) else self.form.format(value)

    @property
    def claimed_text(self) -> str:
        """Return the claimed value as text, with as many digits as were published."""
        if isinstance(self.claimed, tuple):
            return " to ".join(f"{each:,}" for each in self.claimed)
        if isinstance(self.claimed, float):
            return f"{self.claimed:,}".removesuffix(".0")
        return f"{self.claimed:,}" if type(self.claimed) is int else self.shown(self.claimed)

    def agrees(self, value: Any) -> bool:
        """Return whether a computed value equals the claimed one, to the last digit that was claimed."""
        if isinstance(self.claimed, tuple):
            return bool(self.claimed[0] <= value <= self.claimed[1])
        if isinstance(self.claimed, bool) or not isinstance(self.claimed, (int, float)):
            return bool(self.claimed == value)
        decimals = len(repr(self.claimed).partition(".")[2])
        return not math.isnan(value) and bool(abs(value - self.claimed) <= 0.5 * 10.0**-decimals)


@dataclass(frozen=True)
class Entry:
    """A wrong claim, with the computation that refutes it.

    In claim, truth and matters, `{name}` is replaced by a computed value and `{claimed.name}` by a claimed
    one.

    title: the truth and the wrong claim, because readers of a table of contents or of search results see only
    the title. lesson: the id of the lesson that teaches the subject. wrong_rings: names of wrong rings that
    the computation uses; the page shows their edits. modules: names of modules that the computation uses; the
    page shows their text.
    """

    title: str
    claim: str
    truth: str
    matters: str
    lesson: str
    figures: tuple[Figure, ...]
    compute: Callable[[], dict[str, Any]]
    wrong_rings: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    drawing: str = ""

    def filled(self, text: str, values: Values) -> str:
        """Return a text of the entry with the values filled in."""
        shown = {figure.key: figure.shown(values[figure.key]) for figure in self.figures}
        claimed = {figure.key: figure.claimed_text for figure in self.figures}
        return text.format(**{**values, **shown}, claimed=SimpleNamespace(**claimed))

    def refuted(self, values: Values) -> list[str]:
        """Return the faults of the refutation, one line each; empty if it refutes the claim.

        A figure with `holds` should agree with its claimed value, and every other figure should differ from it.
        An entry needs at least one claimed figure that differs.
        """
        amiss = []
        for figure in self.figures:
            if figure.claimed is not None and figure.agrees(values[figure.key]) != figure.holds:
                relation = "differs from" if figure.holds else "is"
                amiss.append(
                    f"{figure.label}: {figure.shown(values[figure.key])} {relation} what was claimed"
                )
        if not any(figure.claimed is not None and not figure.holds for figure in self.figures):
            amiss.append("no figure is claimed to be another one")
        return amiss
