"""Wrong rings as data. `ringlab check ringlab.conformance.mutants:averages_blocks` checks one of them."""

from __future__ import annotations

from typing import Any

from ringlab.conformance.mutants.backward import BACKWARD
from ringlab.conformance.mutants.forward import FORWARD
from ringlab.conformance.mutants.mutant import Mutant
from ringlab.conformance.mutants.published import PUBLISHED
from ringlab.conformance.mutants.wire import WIRE

MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in (*FORWARD, *BACKWARD, *PUBLISHED, *WIRE)}


def __getattr__(name: str) -> Any:
    if name in MUTANTS:
        return MUTANTS[name].target()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
