"""A wrong ring: the plain ring's text, changed in one or a few places."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from ringlab.conformance import plain_ring
from ringlab.conformance.target import Target

SOURCE = Path(plain_ring.__file__).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Mutant:
    """What is wrong, in which part of the ring, and which check must say so.

    changes: (old, new) pairs; each `old` stands in the text of the plain ring exactly once.
    found_by: a check that fails for it; others may fail too. kind: "forward", "mask", "backward",
    "communication", "memory", "precision" or "behaviour". dtypes: those that it claims instead of the plain ring's.
    """

    name: str
    kind: str
    fault: str
    changes: tuple[tuple[str, str], ...]
    found_by: str
    dtypes: tuple[str, ...] = ()

    def source(self) -> str:
        """Return the wrong ring's text. Raises: ValueError unless every change applies exactly once."""
        text = SOURCE
        for old, new in self.changes:
            if text.count(old) != 1:
                raise ValueError(
                    f"{self.name}: needed {old!r} once in the plain ring, got {text.count(old)} times"
                )
            text = text.replace(old, new)
        return text

    def module(self) -> ModuleType:
        """Return a module with the wrong ring's text, which tracebacks can quote."""
        source, name = self.source(), f"ringlab_mutant_{self.name}"
        module = ModuleType(name)
        linecache.cache[f"<{name}>"] = len(source), None, source.splitlines(keepends=True), f"<{name}>"
        import sys

        sys.modules[name] = module  # dataclasses look their module up
        exec(compile(source, f"<{name}>", "exec"), module.__dict__)
        return module

    def target(self) -> Target:
        """Return the wrong ring as a target that claims what the plain ring claims."""
        target = Target(self.module().attend, name=self.name)
        return (replace(target, dtypes=self.dtypes) if self.dtypes else target).completed()
