"""ringlab's own attention as targets: `ringlab check ringlab.conformance.self_targets:ring`, or `:allgather`.

Add `--transport gloo`, or another transport between processes, for real processes.
"""

from __future__ import annotations

from typing import Any

from ringlab.attention import ring_attention
from ringlab.conformance.cases import LAYOUTS
from ringlab.conformance.target.claims import Target


def of(**options: Any) -> Target:
    """Return ring_attention with these options as a target on every layout.

    An all-gather and Ulysses do not promise a ring, and the ranks of Ulysses divide the heads.
    """
    named = ", ".join(f"{key}={value}" for key, value in options.items())
    chosen = options.get("schedule", "ring")
    return Target(
        ring_attention,
        f"ring_attention({named})",
        layouts=tuple(LAYOUTS),
        split_heads=chosen == "ulysses",
        schedule="any" if chosen in ("allgather", "ulysses") else "ring",
        options=options,
    ).completed()


ring = of()
allgather = of(schedule="allgather")
