"""The floors of both packages, from the bottom to the top. Imports point down only."""

from __future__ import annotations

FLOORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("words", ("ringlab.errors", "ringlab.types", "ringlab.edits", "ringlab.temporary")),
    ("tokens and numbers", ("ringlab.checkout", "ringlab.oracle", "ringlab.arrays", "ringlab.layout", "ringlab.lengths", "ringlab.mask", "ringlab.scores",
     "ringlab.tile", "ringlab.pieces", "ringlab.plan", "ringlab.merge")),
    ("one block, one message", ("ringlab.blocks", "ringlab.comm")),
    ("all ranks together", ("ringlab.modes", "ringlab.agreement", "ringlab.schedules", "ringlab.serving")),
    ("the front door", ("ringlab.arguments", "ringlab.attention", "ringlab.sdpa", "ringlab.latent", "ringlab.scan")),
    ("built on the ring", ("ringlab.nn", "ringlab.cost", "ringlab.packing", "ringlab.conformance", "ringlab.plain_ring", "ringlab.plain_step")),
    ("models and pictures", ("ringlab.hf", "ringlab.viz")),
    ("timings", ("ringlab.bench",)),
    ("commands", ("ringlab.cli",)),
    ("python -m ringlab", ("ringlab.__main__",)),
    ("the course: its list of lessons", ("ringlab_course.catalogue",)),
    ("the course: checking answers", ("ringlab_course.checking", "ringlab_course.mesh", "ringlab_course.judge")),
    ("the course: material", ("ringlab_course.clinic", "ringlab_course.errata", "ringlab_course.figures")),
    ("the course: exercises", ("ringlab_course.exercises",)),
    ("the course: notebooks", ("ringlab_course.notebook", "ringlab_course.builder")),
    ("the course: classes", ("ringlab_course.gradebook", "ringlab_course.lab")),
    ("the course: other programs", ("ringlab_course.nbgrader", "ringlab_course.bench")),
    ("the course: commands", ("ringlab_course.cli",)),
)  # fmt: skip
"""Each floor's name and its packages and modules; those on one floor may import each other, but never in a circle."""


def floor_of(module: str) -> int:
    """Return the number of a module's floor. Raises: LookupError if the table does not list it."""
    room = ".".join(module.split(".")[:2])
    for number, (_, rooms) in enumerate(FLOORS):
        if room in rooms:
            return number
    raise LookupError(f"{module} stands on no floor: add {room!r} to the table in tools/house/floors.py")
