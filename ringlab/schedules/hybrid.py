"""Ring × Ulysses: the ranks of a row share the heads of their tokens, and rings connect the rows.

Rank r is member r % U of row r // U. Its ring connects the members that have the same number in all rows.
Each hop of a ring carries 1/U of a row's K/V heads. Source: arXiv 2405.07719.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ringlab.errors import WorldSizeError
from ringlab.schedules.block_schedule import BlockSchedule
from ringlab.schedules.ring import RingSchedule
from ringlab.schedules.ulysses import MeshSchedule


@dataclass(frozen=True)
class HybridSchedule(MeshSchedule):
    """Rings of `ring` rows of `ulysses` ranks each.

    A degree of None is computed from the number of ranks; if both degrees are None, rows have 2 ranks.
    between: the schedule by which a column's K/V blocks travel, such as DoubleRingSchedule(node=2).
    Raises: WorldSizeError for a degree that is not an integer ≥ 1.
    """

    ring: int | None = None
    ulysses: int | None = None
    between: BlockSchedule = field(default_factory=RingSchedule)

    def __post_init__(self) -> None:
        for name, degree in (("ring", self.ring), ("ulysses", self.ulysses)):
            if degree is not None and (not isinstance(degree, int) or degree < 1):
                raise WorldSizeError(f"{name}= a degree ≥ 1 of a hybrid schedule", repr(degree))

    @property
    def name(self) -> str:  # type: ignore[override]
        """Return the name of the schedule with the degrees that were given."""
        given = [f"{n}={d}" for n, d in (("ring", self.ring), ("ulysses", self.ulysses)) if d is not None]
        if not isinstance(self.between, RingSchedule):
            given.append(f"between={self.between.name}")
        return f"hybrid({', '.join(given or ['ulysses=2'])})"

    def degrees(self, world_size: int) -> tuple[int, int]:
        """Return (ring, ulysses). Raises: WorldSizeError unless their product is the number of ranks."""
        ring, ulysses = self.ring, self.ulysses
        if ulysses is None:
            ulysses = 2 if ring is None else max(1, world_size // ring)
        if ring is None:
            ring = max(1, world_size // ulysses)
        if ring * ulysses != world_size:
            raise WorldSizeError(
                f"{ring} · {ulysses} = {ring * ulysses} ranks (ring · ulysses) for schedule '{self.name}'",
                f"{world_size} ranks",
                f"degrees whose product is {world_size}, or schedule='ring'",
            )
        return ring, ulysses
