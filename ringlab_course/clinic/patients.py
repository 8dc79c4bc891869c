"""The patients of the ward: names, complaints, programs. Their faults are not written here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ringlab.errors import CourseError
from ringlab_course.clinic import sound
from ringlab_course.clinic.edits import program_of
from ringlab_course.clinic.ward import BACKWARDS, FORWARDS, source_of

FORWARD, BACKWARD = ("out", "lse"), ("dq", "dk", "dv")
"""What a program of either kind returns."""


@dataclass(frozen=True)
class Patient:
    """A ring program with a fault, and what its user says of it.

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
        """Whether the program is a forward; else it is a backward."""
        return self.returns == FORWARD


_COMPLAINTS = {
    "ash": "Contiguous shards trained for weeks. We switched to another layout for balance: the loss is NaN in the first step.",
    "birch": "On one device perplexity matches the paper. It gets worse with every device that we add. Nothing crashes.",
    "cedar": "With the balanced layout the training loss is better than ever. The model generates rubbish.",
    "elm": "All our tests pass, on any number of ranks. The network team says that we send more than we announced.",
    "fir": "It used to deadlock. We mended that by ordering the sends. Since then the loss does not go down, and some ranks look worse than others.",
    "hazel": "Gradient checks pass on our two-GPU workstation. On the cluster the loss goes down and then up again.",
    "larch": "Trains well in mixed precision. Somebody ran the unit tests in float32, and they are red.",
    "oak": "Inference is fine on any number of ranks. Fine-tuning on more than one goes nowhere.",
    "rowan": "The loss goes down, but more slowly than on one device. The gradient test passes; it allows an absolute error of 0.01, and gradients are small.",
    "willow": "Everything passes at 1e-2. A colleague insists on 1e-5, and says that we lose digits somewhere.",
    "yew": "It hangs. On one rank it does not.",
}
_RETURNS = dict.fromkeys(FORWARDS, FORWARD) | dict.fromkeys(BACKWARDS, BACKWARD)
PATIENTS = {
    name: Patient(name, _RETURNS[name], text, program_of(source_of(name), name), source_of(name))
    for name, text in _COMPLAINTS.items()
}
"""By name. The lesson examines the last three; the exercise is about the first eight."""
TO_MEND = tuple(name for name in PATIENTS if name not in ("rowan", "willow", "yew"))
SOUND = {
    FORWARD: Patient("a sound forward", FORWARD, "None.", sound.forward, source_of("forward")),
    BACKWARD: Patient("a sound backward", BACKWARD, "None.", sound.backward, source_of("backward")),
}
"""By what is returned."""

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
"""Possible faults, by their names in a chart; not all occur in this ward."""


def patient(name: str) -> Patient:
    """Return the patient called `name`. Raises: CourseError if there is none."""
    if name not in PATIENTS:
        raise CourseError(f"a patient: {', '.join(PATIENTS)}", repr(name))
    return PATIENTS[name]
