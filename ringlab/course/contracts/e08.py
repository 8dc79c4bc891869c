"""Exercise 08, layouts as one family: dealing, runs, tiles, balance, packed documents."""

from __future__ import annotations

from ringlab.course.contract import Exercise
from ringlab.course.contracts import e08_layouts, e08_packed, e08_tiles

EXERCISE = Exercise(
    id="08",
    slug="08_striped_and_zigzag",
    title="Striped and zig-zag",
    stages=(
        e08_layouts.DEAL_STAGE,
        e08_layouts.RUNS_STAGE,
        e08_tiles.TILES_STAGE,
        e08_tiles.BALANCE_STAGE,
        e08_packed.STAGE,
    ),
    about=tuple(f"ringlab.layout.{name}" for name in ("contiguous", "striped", "zigzag", "dealt")),
)
