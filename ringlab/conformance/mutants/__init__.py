"""Wrong rings as edits of the plain ring. `ringlab check ringlab.conformance.mutants:averages_blocks` checks one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ringlab.conformance.mutants.mutant import Mutant, read

FILES = tuple(Path(__file__).with_name(f"{name}.md") for name in ("forward", "backward", "published", "wire"))
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for path in FILES for mutant in read(path)}


def __getattr__(name: str) -> Any:
    if name in MUTANTS:
        return MUTANTS[name].target()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
