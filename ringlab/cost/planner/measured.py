"""Seconds of attention by rank and step from measurements in the hardware file, as the simulator takes them."""

from __future__ import annotations

import numpy as np

from ringlab.cost.block_time import MeasuredTime, block_time
from ringlab.cost.flops import attention_flops
from ringlab.cost.planner.request import Request
from ringlab.cost.sizes import Attention
from ringlab.layout import get_layout
from ringlab.plan import tiles

ALL_PAIRS = 16  # ranks; in larger rings one pair represents all pairs of its kind


def measured_time(request: Request, D: int) -> MeasuredTime | None:
    """Return the measured block time of this dtype and head dim, None if there is none."""
    time = block_time(request.machine, request.dtype, request.tile, D)
    return time if isinstance(time, MeasuredTime) else None


def attention_flops_per_s(request: Request, D: int, backward: bool) -> float:
    """Return the FLOP/s of attention in large blocks: as measured, otherwise the fraction of the peak that is reached."""
    time = measured_time(request, D)
    block = (time.backward if backward else time.forward) if time else None
    if block is not None and block.per_score_s > 0:
        return attention_flops(Attention(1, 1, 1, D, request.dtype), 1, backward) / block.per_score_s
    reached = request.machine.reached
    fraction = reached.attention_backward if backward else reached.attention_forward
    return request.machine.peak(request.dtype) * fraction


def measured_seconds(
    time: MeasuredTime, request: Request, sizes: Attention, layout: str, P: int, backward: bool
) -> np.ndarray:
    """Return seconds by (rank, step), (P, P).

    In rings of more than ALL_PAIRS ranks a rank's own block, an earlier and a later one are taken
    from ranks 0 and 1: exact if all ranks own equally many tokens.
    Raises: CostError if this pass was not measured.
    """
    dealt = get_layout(layout, request.tokens, P)

    def pair(rank: int, origin: int) -> float:
        found = tiles(dealt, rank, origin, request.causal)
        return time.seconds(found, sizes, dealt.length(rank), backward)

    ranks, steps = np.arange(P)[:, None], np.arange(P)[None, :]
    if P <= ALL_PAIRS:
        return np.array([[pair(rank, (rank - step) % P) for step in range(P)] for rank in range(P)])
    own, earlier, later = pair(0, 0), pair(1, 0), pair(0, 1)
    return np.where(steps == 0, own, np.where(steps <= ranks, earlier, later))
