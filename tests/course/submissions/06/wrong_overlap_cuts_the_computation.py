# expects: check=06.overlap:order misconception=cuts_the_computation
"""Each block in two halves, each a computation."""

import math

from ringlab.blocks import get_block
from ringlab.merge import Partial, merge


def attend(q, k, v):
    return get_block("naive", q).forward(q, k, v, causal=False, scale=1 / math.sqrt(q.shape[-1]))


def overlapped_ring(ring, q, k, v):
    state = Partial.identity(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v)
        half = (k.shape[-2] + 1) // 2
        for part in (slice(0, half), slice(half, None)):
            if k[..., part, :].shape[-2]:
                state = merge(state, ring.compute("half", attend, q, k[..., part, :], v[..., part, :]))
        if work:
            k, v = work.wait()
    return state.out, state.lse
