"""Schedules by name: the ways in which query rows and the K/V blocks of all ranks are brought together.

ring         blocks travel from neighbour to neighbour, and each hop is hidden behind a step of computation
allgather    every rank first fetches all blocks
ulysses      ranks exchange tokens for heads, and exchange back after attention
hybrid       Ulysses within rows of ranks, and rings across the rows: hybrid(ring=4, ulysses=2)
double-ring  blocks go around inside a node, then on to the next node: double-ring(node=8)
query-ring   blocks stay; queries travel with their partials, and in backward with their gradients
burst        blocks travel in forward, and queries in backward
bidirectional  blocks come from both sides, in half as many rounds as in a ring
multi-ring   the heads are distributed among rings of different strides: multi-ring(rings=4)
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ringlab.errors import BackendError
from ringlab.schedules.allgather import AllGatherSchedule
from ringlab.schedules.bidirectional import BidirectionalSchedule
from ringlab.schedules.double_ring import DoubleRingSchedule
from ringlab.schedules.hybrid import HybridSchedule
from ringlab.schedules.multi_ring import MultiRingSchedule
from ringlab.schedules.protocol import Schedule
from ringlab.schedules.query_ring import BurstSchedule, QueryRingSchedule
from ringlab.schedules.ring import RingSchedule
from ringlab.schedules.ulysses import UlyssesSchedule

_SCHEDULES: dict[str, tuple[Callable[..., Schedule], tuple[str, ...]]] = {
    "ring": (RingSchedule, ()),
    "allgather": (AllGatherSchedule, ()),
    "ulysses": (UlyssesSchedule, ()),
    "hybrid": (HybridSchedule, ("ring", "ulysses")),
    "double-ring": (DoubleRingSchedule, ("node",)),
    "query-ring": (QueryRingSchedule, ()),
    "burst": (BurstSchedule, ()),
    "bidirectional": (BidirectionalSchedule, ()),
    "multi-ring": (MultiRingSchedule, ("rings",)),
}
"""The class of each schedule, and the degrees that its name accepts."""


def available() -> tuple[str, ...]:
    """Return the names of the schedules.

    Without degrees in its name, a hybrid or double ring has groups of two ranks.

    >>> available()
    ('ring', 'allgather', 'ulysses', 'hybrid', 'double-ring', 'query-ring', 'burst', 'bidirectional', 'multi-ring')
    """
    return tuple(_SCHEDULES)


def get_schedule(name: str | Schedule) -> Schedule:
    """Return the schedule called `name`, such as "ring" or "hybrid(ring=4, ulysses=2)".

    A schedule object is returned unchanged.
    Raises: BackendError for an unknown name or degree; WorldSizeError for a degree below 1.

    >>> get_schedule("hybrid(ring=4, ulysses=2)").degrees(world_size=8)
    (4, 2)
    """
    if not isinstance(name, str) and all(hasattr(name, part) for part in ("check", "forward", "backward")):
        return name
    found = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", name) if isinstance(name, str) else None
    if found is None or found[1] not in _SCHEDULES:
        raise BackendError(f"one of the schedules {', '.join(_SCHEDULES)}", repr(name))
    make, degrees = _SCHEDULES[found[1]]
    return make(**_degrees(found[1], found[2] or "", degrees))


def _degrees(name: str, text: str, known: tuple[str, ...]) -> dict[str, int]:
    """Return the degrees in the brackets of a schedule's name."""
    given: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        found = re.fullmatch(r"(\w+)\s*=\s*(\d+)", part)
        if found is None or found[1] not in known or found[1] in given:
            example = ", ".join(f"{degree}=2" for degree in known)
            raise BackendError(
                f"schedule='{name}({example})'" if known else f"schedule='{name}', without degrees",
                repr(f"{name}({text})"),
            )
        given[found[1]] = int(found[2])
    return given
