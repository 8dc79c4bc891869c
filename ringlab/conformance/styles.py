"""Right rings in ten styles that the suite must accept, such as Ulysses, and queries that travel.

`ringlab check ringlab.conformance.styles:travelling_queries` checks one of them. `styles.md` contains the
styles, as edits of the plain ring or names of ringlab's own schedules, with the promises that each style does
not keep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ringlab import edits
from ringlab.conformance import self_targets
from ringlab.conformance.mutants import SOURCE
from ringlab.conformance.target.claims import Target

FILE = Path(__file__).with_suffix(".md")


@dataclass(frozen=True)
class Style:
    """A right ring: its difference from the plain ring, and the promises that it does not keep.

    lacks: the promise of a ring that the style does not keep, and the reason; "" if it keeps all. allow: the
    checks that may fail for that reason. schedule: one of ringlab's own schedules, which replaces an edit.
    dtypes, ranks: those that the style claims, if they are not the usual ones.

    >>> STYLES["two_levels"].allow
    ('rounds',)
    """

    name: str
    does: str
    lacks: str
    hunks: str
    schedule: str = ""
    allow: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def source(self) -> str:
        """Return the text of an edited plain ring. Raises: EditError unless every hunk applies exactly once."""
        return edits.apply(self.hunks, SOURCE, f"style {self.name!r}")

    def target(self) -> Target:
        """Return the style as a target with its claims."""
        if self.schedule:
            target = self_targets.of(schedule=self.schedule)
        else:
            module = edits.as_module(self.source(), f"ringlab_style_{self.name}")
            target = Target(module.attend, name=self.name)
        return replace(
            target,
            allow=dict.fromkeys(self.allow, self.lacks),
            dtypes=self.dtypes or target.dtypes,
            ranks=self.ranks or target.ranks,
        ).completed()


def read(source: Path | str) -> list[Style]:
    r"""Return the styles in a file or a text. Raises: EditError for an invalid file.

    >>> [style.hunks for style in read("## mine\nschedule ring\n\nblocks travel")]
    ['']
    """
    found = []
    for entry in edits.read(source, optional=("schedule", "allow", "dtypes", "ranks")):
        does, _, lacks = entry.text.partition("\n\n")
        found.append(
            Style(
                entry.name,
                does,
                lacks,
                entry.hunks,
                schedule=entry.fields.get("schedule", ""),
                allow=tuple(filter(None, entry.fields.get("allow", "").split(", "))),
                dtypes=tuple(entry.fields.get("dtypes", "").split()),
                ranks=tuple(map(int, entry.fields.get("ranks", "").split())),
            )
        )
    return found


STYLES: dict[str, Style] = {style.name: style for style in read(FILE)}


def __getattr__(name: str) -> Target:
    if name in STYLES:
        return STYLES[name].target()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
