"""The patients of the bug clinic: their names, complaints and programs.

A patient's program is the ring program in sound.py with the patient's edits from patients.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringlab import edits
from ringlab.errors import CourseError
from ringlab_course.clinic import sound
from ringlab_course.clinic.edits import program_of

FORWARD, BACKWARD = ("out", "lse"), ("dq", "dk", "dv")
"""The names of the results of a forward and of a backward program."""
KINDS = {"forward": FORWARD, "backward": BACKWARD}


@dataclass(frozen=True)
class Patient:
    """A ring program with a fault, and the complaint of its user.

    A forward program is called as (ring, q, k, v, positions, causal) and returns (out, lse); a backward
    program as (ring, dout, q, k, v, out, lse, positions, causal), and returns (dq, dk, dv).
    """

    name: str
    returns: tuple[str, ...]
    complaint: str
    program: Callable[..., Any] = field(repr=False)
    source: str = field(repr=False)

    @property
    def is_forward(self) -> bool:
        """Return whether the program is a forward, not a backward."""
        return self.returns == FORWARD


_ENTRIES = {
    entry.name: entry for entry in edits.read(Path(__file__).with_name("patients.md"), required=("kind",))
}


def source_of(name: str) -> str:
    """Return the text of a patient's program, or of the sound one if `name` is `forward` or `backward`."""
    if name in KINDS:
        return inspect.getsource(getattr(sound, name))
    entry = _ENTRIES[name]
    return edits.apply(entry.hunks, source_of(entry.fields["kind"]), f"patient {name!r}")


PATIENTS = {
    name: Patient(
        name, KINDS[entry.fields["kind"]], entry.text, program_of(text := source_of(name), name), text
    )
    for name, entry in _ENTRIES.items()
}
"""The patients by name. The exercise is about the first eight, and the lesson examines the last three."""
TO_MEND = tuple(name for name in PATIENTS if name not in ("rowan", "willow", "yew"))
SOUND = {
    returns: Patient(f"a sound {kind}", returns, "None.", getattr(sound, kind), source_of(kind))
    for kind, returns in KINDS.items()
}
"""The two sound programs, by the names of their results."""

FAULTS = {
    "bf16 result": "a result is rounded to bfloat16, whatever the inputs' dtype",
    "blind rows": "rows that see no key of a block: −inf − (−inf)",
    "couriers backwards": "dK and dV travel against K and V",
    "deadlock": "every rank waits for somebody who waits",
    "delta of the block": "delta is computed per block, not over the whole row",
    "first block": "the K and V of the first step are used in every step",
    "keys as values": "K and V change places on the way",
    "lost sum": "what was normalised before is merged as if it were not",
    "masks by rank": "what a query may see is decided by ranks and local indices, not by positions",
    "mean over ranks": "a sum over ranks is divided by their number",
    "no last hop": "dK and dV stop one rank before home",
    "one hop too many": "K and V travel further than they are needed",
    "scaled twice": "the gradients of q and k contain the scale twice",
    "sent for received": "what was sent is kept in place of what arrived",
    "shared memory": "a sum lies in memory that is written again",
    "weights of the block": "the backward takes the lse of the block, not the final one",
}
"""Descriptions of possible faults, by their names in a chart. Not all of them occur in this ward."""


def patient(name: str) -> Patient:
    """Return the patient called `name`. Raises: CourseError if there is none."""
    if name not in PATIENTS:
        raise CourseError(f"a patient: {', '.join(PATIENTS)}", repr(name))
    return PATIENTS[name]
