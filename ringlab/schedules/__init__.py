"""Schedules, by name, and the forward and backward that are the same for all of them."""

from __future__ import annotations

from torch import Tensor

from ringlab.errors import BackendError
from ringlab.merge import Partial
from ringlab.schedules.allgather import AllGatherSchedule
from ringlab.schedules.call import Call, Saved, attend, attend_backward
from ringlab.schedules.protocol import Schedule
from ringlab.schedules.ring import RingSchedule

_SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule for schedule in (RingSchedule(), AllGatherSchedule())
}


def available() -> tuple[str, ...]:
    """Return the names of the schedules."""
    return tuple(_SCHEDULES)


def get_schedule(name: str) -> Schedule:
    """Return the schedule called `name`. Raises: BackendError."""
    if name not in _SCHEDULES:
        raise BackendError(f"a schedule among {', '.join(_SCHEDULES)}", repr(name))
    return _SCHEDULES[name]


def forward(schedule: Schedule, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Return attention of this rank's queries over the blocks of all ranks."""
    steps = call.forward_steps(q)
    for step, (origin, block_k, block_v) in enumerate(schedule.blocks(call, k, v)):
        call.compute(f"attend {step}", attend, steps, origin, block_k, block_v)
    return steps.result()


def backward(
    schedule: Schedule, call: Call, saved: Saved, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of this rank's shards: dk and dv in the state dtype, dq in that or in q's own."""
    steps, homecoming = call.backward_steps(saved), schedule.homecoming(call)
    for step, (origin, block_k, block_v) in enumerate(schedule.blocks(call, k, v)):
        # No name for the gradients: it would keep them while the next block is computed.
        homecoming.add(
            origin,
            block_k,
            block_v,
            call.compute(f"attend backward {step}", attend_backward, steps, origin, block_k, block_v),
        )
    dk, dv = homecoming.finish()
    return steps.result(), dk, dv
