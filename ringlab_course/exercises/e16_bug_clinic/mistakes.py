"""Mistakes in mending the patients of exercise 16, and what each of them returns."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.conformance.runs import Run
from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.clinic.case import shards_of
from ringlab_course.clinic.patients import PATIENTS
from ringlab_course.exercises.e16_bug_clinic.half_mended import HALF_MENDED, half_mended

mistake = mistakes_of("16")

Results = list[tuple[torch.Tensor, ...]]
ORDER = {
    "fir": (mistake("all_send_first"),),
}
"""By patient: mistakes in the order of messages, which nobody lives to compare results of."""


@lru_cache(maxsize=256)
def _imitation(name: str, half: str, run: Run) -> Results | None:
    """Return what the patient as it was, or with a mistake in mending it, returns; None where it breaks off."""
    given, patient = shards_of(run), PATIENTS[name]
    program = half_mended(name, half) if half else patient.program
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
        _of(name, mistake("as_it_was", partial(_imitation, name, ""))),
        *(mistake(half, partial(_imitation, name, half)) for half in HALF_MENDED[name]),
        _of(name, mistake("assumes_equal_lengths")),
        _of(name, mistake("asks_everybody")),
        *ORDER.get(name, ()),
        _of(name, mistake("not_diagnosed")),
        _of(name, mistake("by_another_name")),
    )


def _of(name: str, any_patient: Misconception) -> Misconception:
    """The mistake of one patient, where its text speaks of any."""
    return replace(any_patient, message=any_patient.message.format(patient=name))


def named(name: str, called: str) -> Misconception:
    """Return the mistake of this name in mending this patient."""
    return next(each for each in mistakes(name) if each.name == called)
