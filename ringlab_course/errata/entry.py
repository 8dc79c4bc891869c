"""One wrong claim: the claimed values, the computed ones, and where they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

Values = Mapping[str, Any]
ROUNDING = 1e-12
"""A smaller value is printed as "below" this: its digits differ from machine to machine."""


@dataclass(frozen=True)
class Figure:
    """One row of an entry's table.

    key: the name of the computed value. claimed: what was published; (least, most) for a range; None where
    nothing was. holds: the claim has this one right. form: how both are printed.
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
        """The claimed value, with the digits that were claimed."""
        if isinstance(self.claimed, tuple):
            return " to ".join(f"{each:,}" for each in self.claimed)
        if isinstance(self.claimed, float):
            return f"{self.claimed:,}".removesuffix(".0")
        return f"{self.claimed:,}" if type(self.claimed) is int else self.shown(self.claimed)

    def agrees(self, value: Any) -> bool:
        """Return whether what was computed is what was claimed, to the last digit that was claimed."""
        if isinstance(self.claimed, tuple):
            return bool(self.claimed[0] <= value <= self.claimed[1])
        if isinstance(self.claimed, bool) or not isinstance(self.claimed, (int, float)):
            return bool(self.claimed == value)
        decimals = len(repr(self.claimed).partition(".")[2])
        return not math.isnan(value) and bool(abs(value - self.claimed) <= 0.5 * 10.0**-decimals)


@dataclass(frozen=True)
class Entry:
    """A wrong claim. In claim, truth and matters, `{name}` stands for a computed value, `{claimed.name}` for a claimed one.

    title: what is true, and what is not: readers of the list of contents or of a search see nothing else.
    lesson: the id of the lesson that teaches it. wrong_rings: names of wrong rings that the computation uses,
    whose change the page shows. modules: names of modules that it uses, whose text the page shows.
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

    def filled(self, text: str, values: Values) -> str:
        """Return a text with its figures."""
        shown = {figure.key: figure.shown(values[figure.key]) for figure in self.figures}
        claimed = {figure.key: figure.claimed_text for figure in self.figures}
        return text.format(**{**values, **shown}, claimed=SimpleNamespace(**claimed))

    def refuted(self, values: Values) -> list[str]:
        """Return what is amiss with the refutation: figures that agree with the claim, or differ where it holds.

        An entry without a claimed figure that differs refutes nothing.
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
