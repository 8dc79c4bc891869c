"""Wrong rings as edits of the plain ring, and wrong training steps as edits of the plain step.

`ringlab check ringlab.conformance.mutants:averages_blocks` checks one of them; for a step, add `--kind step`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ringlab import edits, plain_ring, plain_step
from ringlab.conformance.target.claims import Target

FILES = tuple(
    Path(__file__).with_name(f"{name}.md")
    for name in ("forward", "backward", "published", "arguments", "wire")
)
STEPS_FILE = Path(__file__).with_name("step.md")
SOURCE = Path(plain_ring.__file__).read_text(encoding="utf-8")
STEP = Path(plain_step.__file__).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Mutant:
    """A wrong ring: an edit of a few lines of the plain ring, and the check that must find the fault.

    hunks: edits of `right`, the plain ring or the plain step, in the form of `ringlab.edits`.
    found_by: a check that fails for this mutant; other checks may fail too. kind: "forward", "mask",
    "backward", "communication", "memory", "precision" or "behaviour"; for a step, the part of the step, such
    as "labels".
    dtypes: the dtypes that the mutant claims instead of the plain ring's. split_heads: whether it claims, as
    Ulysses does, that ranks divide the heads. cross: whether it claims keys of another number than the queries. slopes_of_each:
    whether it claims slopes of ALiBi that differ between sequences.

    >>> from ringlab.conformance.mutants import MUTANTS
    >>> MUTANTS["averages_blocks"].found_by
    'forward'
    """

    name: str
    kind: str
    fault: str
    hunks: str
    found_by: str
    dtypes: tuple[str, ...] = ()
    right: str = field(default=SOURCE, repr=False)
    split_heads: bool = False
    cross: bool = False
    slopes_of_each: bool = False

    def source(self) -> str:
        """Return the source of the wrong ring. Raises: EditError unless every hunk applies exactly once."""
        return edits.apply(self.hunks, self.right, f"wrong ring {self.name!r}")

    def module(self) -> ModuleType:
        """Return a module with the wrong ring's text; tracebacks can quote its lines."""
        return edits.as_module(self.source(), f"ringlab_mutant_{self.name}")

    def target(self) -> Target:
        """Return the wrong ring as a target with the plain ring's claims."""
        target = Target(self.module().attend, name=self.name)
        if self.split_heads:
            target = replace(target, split_heads=True, schedule="any")
        if self.cross:
            target = replace(target, cross=True)
        if self.slopes_of_each:
            target = replace(target, slopes_of_each=True)
        return (replace(target, dtypes=self.dtypes) if self.dtypes else target).completed()


def read(path: Path, right: str = SOURCE) -> list[Mutant]:
    """Return the wrong programs in a file of edits of `right`. Raises: EditError for an invalid file.

    >>> from ringlab.conformance.mutants import FILES, read
    >>> len(read(FILES[0])) > 1
    True
    """
    return [
        Mutant(
            name=entry.name,
            kind=entry.fields["kind"],
            fault=entry.text,
            hunks=entry.hunks,
            found_by=entry.fields["found_by"],
            dtypes=tuple(entry.fields.get("dtypes", "").split()),
            right=right,
            split_heads="split_heads" in entry.fields,
            cross="cross" in entry.fields,
            slopes_of_each="slopes_of_each" in entry.fields,
        )
        for entry in edits.read(
            path, required=("kind", "found_by"), optional=("dtypes", "split_heads", "cross", "slopes_of_each")
        )
    ]


MUTANTS: dict[str, Mutant] = {mutant.name: mutant for path in FILES for mutant in read(path)}
STEPS: dict[str, Mutant] = {mutant.name: mutant for mutant in read(STEPS_FILE, STEP)}


def __getattr__(name: str) -> Any:
    if name in MUTANTS:
        return MUTANTS[name].target()
    if name in STEPS:
        return STEPS[name].module().step
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
