"""Mistakes in mending the patients of exercise 16, and the results of each.

A half-mended patient is the patient, or a sound ring, with a few lines changed: the symptom is cured, the fault stays.
Checks imitate these to name the mistake; they are among the exercise's wrong answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import torch

from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.conformance.run.run import Run
from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.clinic.case import shards_of
from ringlab_course.clinic.edits import Changes, edited, program_of
from ringlab_course.clinic.patients import PATIENTS, source_of

_LARCH_SUM = """\
        if dq is None:
            dq = scratch.to(lse.dtype)
        else:
            dq += scratch.to(lse.dtype)
"""
_ADDED = "        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]\n"

HALF_MENDED: dict[str, dict[str, tuple[str, Changes]]] = {
    "ash": {
        "minus_ten_thousand": (
            "ash",
            (
                (
                    "scores = scores_of(q, k, visible)\n",
                    "scores = scores_of(q, k, visible).masked_fill(~visible, -1e4)\n",
                ),
            ),
        ),
        "nan_to_zero": (
            "ash",
            (
                (
                    "    return out.to(q.dtype), lse\n",
                    "    return out.nan_to_num().to(q.dtype), lse.nan_to_num()\n",
                ),
            ),
        ),
        "skips_what_is_partly_hidden": ("ash", (("if visible.any():", "if visible.any(-1).all():"),)),
    },
    "birch": {
        "old_sum_not_rescaled": (
            "birch",
            (
                ("            total = total * kept + weights.sum(-1)\n", ""),
                ("            out = out * kept[..., None]", "            out = out * total[..., None]"),
                (
                    "            out = out / total",
                    "            total = total + weights.sum(-1)\n            out = out / total",
                ),
            ),
        ),
        "new_sum_for_the_old": (
            "birch",
            (("out = out * kept[..., None]", "out = out * (total * kept)[..., None]"),),
        ),
        "never_divides": (
            "birch",
            (("            out = out / total.masked_fill(total == 0, 1.0)[..., None]\n", ""),),
        ),
    },
    "cedar": {
        "striped_alone": (
            "forward",
            (
                (
                    "    out, lse = nothing_seen(q)\n",
                    "    P = ring.world_size\n"
                    "    positions = [torch.arange(len(own)) * P + rank for rank, own in enumerate(positions)]\n"
                    "    out, lse = nothing_seen(q)\n",
                ),
            ),
        ),
        "skips_by_rank": (
            "cedar",
            (
                (
                    "        visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)\n"
                    "        if causal and origin == ring.rank:\n"
                    "            visible = visible.tril()\n",
                    "        visible = sees(positions, ring.rank, origin, causal)\n",
                ),
            ),
        ),
    },
    "elm": {
        "drops_the_last_block": (
            "elm",
            (("for step in range(ring.world_size):", "for step in range(max(1, ring.world_size - 1)):"),),
        ),
        "drops_the_only_block": (
            "elm",
            (("for step in range(ring.world_size):", "for step in range(ring.world_size - 1):"),),
        ),
    },
    "fir": {
        "mended_for_even_numbers": (
            "fir",
            (
                (
                    "            k, v = receive(ring, k, length), receive(ring, v, length)\n",
                    "            next_v = receive(ring, v, length)\n            k, v = receive(ring, k, length), next_v\n",
                ),
            ),
        ),
        "everybody_sends_values_first": (
            "fir",
            (
                (
                    "            send(ring, k)\n            send(ring, v)\n            k, v = receive(",
                    "            send(ring, v)\n            send(ring, k)\n            k, v = receive(",
                ),
            ),
        ),
        "mended_on_the_side_that_is_well": ("fir", (("k, v = next_k, next_v", "k, v = next_v, next_k"),)),
    },
    "hazel": {
        "ends_at_the_neighbour": (
            "backward",
            (("        if P > 1:\n", "        if step < P - 1:\n"),),
        ),
    },
    "larch": {
        "float32_whatever_comes": (
            "backward",
            (
                (_ADDED, "        dq += part[0].float()\n        dk, dv = dk + part[1], dv + part[2]\n"),
                (
                    "    for step in range(P):\n",
                    "    dq = torch.zeros(q.shape, dtype=torch.float32)\n    for step in range(P):\n",
                ),
            ),
        ),
        "last_block_alone": ("larch", ((_LARCH_SUM, "        dq = scratch.to(lse.dtype)\n"),)),
        "shared_until_the_second_step": (
            "larch",
            (("dq += scratch.to(lse.dtype)", "dq = dq + scratch.to(lse.dtype)"),),
        ),
    },
    "oak": {
        "one_step_late": (
            "oak",
            (
                (
                    "            block = work.wait()\n",
                    "            k, v = block\n            block = work.wait()\n",
                ),
            ),
        ),
        "sends_its_own_again": (
            "oak",
            (
                ("ring.post(*block,", "ring.post(k, v,"),
                ("block_backward(dout, q, k, v,", "block_backward(dout, q, *block,"),
            ),
        ),
    },
}
"""By patient and mistake: whose text it is, and what is changed in it. The first is the one that checks must find."""


@cache
def half_mended(name: str, mistake: str) -> Callable[..., Any]:
    """Return the patient's program with this mistake in place of its fault."""
    base, changes = HALF_MENDED[name][mistake]
    return program_of(edited(source_of(base), changes), base, f"with {name}'s mistake {mistake}")


mistake = mistakes_of("16")

Results = list[tuple[torch.Tensor, ...]]
UNCOMPARED = {
    "fir": (mistake("all_send_first"),),
    "larch": (mistake("sums_in_the_narrow_dtype"),),
}
"""By patient: mistakes that no comparison of results can find. An order of messages that deadlocks leaves no results, and a
dtype does not show in values."""


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
        *UNCOMPARED.get(name, ()),
        _of(name, mistake("not_diagnosed")),
        _of(name, mistake("another_program")),
        _of(name, mistake("by_another_name")),
    )


def _of(name: str, any_patient: Misconception) -> Misconception:
    """The mistake of one patient, where its text speaks of any."""
    return replace(any_patient, message=any_patient.message.format(patient=name))


def named(name: str, called: str) -> Misconception:
    """Return the mistake of this name in mending this patient."""
    return next(each for each in mistakes(name) if each.name == called)
