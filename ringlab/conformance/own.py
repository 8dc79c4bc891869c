"""ringlab's own attention as targets: `ringlab check ringlab.conformance.own:ring`, or `:allgather`.

Add `--transport gloo`, or another one between processes, for real processes.
"""

from __future__ import annotations

from typing import Any

from ringlab.attention import ring_attention
from ringlab.conformance.cases import LAYOUTS
from ringlab.conformance.target import Target


def of(**options: Any) -> Target:
    """Return ring_attention with these options as a target on every layout; an all-gather does not promise a ring."""
    named = ", ".join(f"{key}={value}" for key, value in options.items())
    schedule = "any" if options.get("schedule") == "allgather" else "ring"
    name = f"ring_attention({named})"
    return Target(
        ring_attention, name, layouts=tuple(LAYOUTS), schedule=schedule, options=options
    ).completed()


ring = of()
allgather = of(schedule="allgather")
naive = of(block="naive")
blockwise = of(block="blockwise")
