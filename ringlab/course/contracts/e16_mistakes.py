"""Mistakes in mending the patients of exercise 16, and what each of them returns."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from ringlab.comm.virtual import VirtualCluster
from ringlab.conformance.runs import Run
from ringlab.course.clinic.examine import shards_of
from ringlab.course.clinic.patients import PATIENTS
from ringlab.course.contract import Misconception
from ringlab.course.contracts.e16_half_mended import half_mended
from ringlab.course.contracts.e16_texts import HALF

Results = list[tuple[torch.Tensor, ...]]
ORDER = {
    "fir": (
        Misconception(
            "all_send_first",
            "fir: every rank sends first, and waits for somebody who receives. That is the deadlock which the order had cured: who goes first is right; what goes first is not.",
        ),
    ),
}
"""By patient: mistakes in the order of messages, which nobody lives to compare results of."""


@lru_cache(maxsize=256)
def _imitation(name: str, mistake: str, run: Run) -> Results | None:
    """Return what the patient as it was, or with a mistake in mending it, returns; None where it breaks off."""
    given, patient = shards_of(run), PATIENTS[name]
    program = half_mended(name, mistake) if mistake else patient.program
    arguments = given.of(patient.returns)

    def on_rank(ring: Any) -> Any:
        own = (each[ring.rank].clone() for each in arguments)
        return program(ring, *own, positions=given.positions, causal=run.causal)

    try:
        return VirtualCluster(run.P, memory=False).run(on_rank).results
    except Exception:
        return None


@lru_cache
def mistakes(name: str) -> tuple[Misconception, ...]:
    """Return the mistakes that can be made in mending this patient."""
    return (
        Misconception(
            "as_it_was",
            f"{name} is as it was: what is returned, and sent, is what the patient returned and sent.",
            partial(_imitation, name, ""),
        ),
        *(
            Misconception(mistake, f"{name}: {text}", partial(_imitation, name, mistake))
            for mistake, text in HALF[name].items()
        ),
        Misconception(
            "assumes_equal_lengths",
            f"{name} takes the blocks of other ranks to be as long as its own. `positions` says how many tokens each of them has.",
        ),
        Misconception(
            "asks_everybody",
            f"{name} asks every rank for its share now. A ring talks to the next rank only: mend the line that is wrong, and leave the ring a ring.",
        ),
        *ORDER.get(name, ()),
        Misconception(
            "not_diagnosed",
            f"The ring is right, but what `chart` says of {name} does not hold yet, and so nobody knows what was mended. Diagnose first: without that, the best ring in its place earns nothing.",
        ),
        Misconception(
            "by_another_name",
            f"The ring is right, but the chart of {name} blames something else for what was mended. If the source showed another fault than you had named, add it to the chart as `found`.",
        ),
    )


def named(name: str, mistake: str) -> Misconception:
    """Return the mistake of this name in mending this patient."""
    return next(each for each in mistakes(name) if each.name == mistake)
