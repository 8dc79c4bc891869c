"""Right rings in ten styles, which the suite must accept: Ulysses, both directions, queries that travel, and others.

`ringlab check ringlab.conformance.styles:travelling_queries` checks one. `styles.md` holds them, as edits of the plain
ring or names of ringlab's own schedules, with what each does not promise.
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
    """A right ring: what it does differently from the plain ring, and what it does not promise.

    lacks: which promise of a ring it does not keep, and why; "" if it keeps them all. allow: checks that may fail for
    that reason. schedule: of ringlab's own, in place of an edit. dtypes, ranks: those that it claims, if not the usual ones.

    >>> STYLES["both_directions"].allow
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
    r"""Return the styles of a file, or of a text. Raises: EditError for one that is invalid.

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
