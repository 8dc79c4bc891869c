"""Exercise 08, layouts as one family: dealing, runs, tiles, balance, packed documents."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.checking.forbidden import makers_of_layouts
from ringlab_course.exercises.e08_striped_and_zigzag import balance as e08_balance
from ringlab_course.exercises.e08_striped_and_zigzag import deal as e08_deal
from ringlab_course.exercises.e08_striped_and_zigzag import packed as e08_packed
from ringlab_course.exercises.e08_striped_and_zigzag import runs as e08_runs
from ringlab_course.exercises.e08_striped_and_zigzag import tiles as e08_tiles

EXERCISE = Exercise(
    id="08",
    slug="08_striped_and_zigzag",
    title="Striped and zig-zag",
    stages=(
        e08_deal.STAGE,
        e08_runs.STAGE,
        e08_tiles.STAGE,
        e08_balance.STAGE,
        e08_packed.STAGE,
    ),
    about=makers_of_layouts(),
)
