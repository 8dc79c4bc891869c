# expects: check=06.overlap:values misconception=never_waits
"""Believes that post returns the block."""

import math

from ringlab.blocks import get_block
from ringlab.merge import Partial, merge


def attend(q, k, v):
    return get_block("naive", q).forward(q, k, v, causal=False, scale=1 / math.sqrt(q.shape[-1]))


def overlapped_ring(ring, q, k, v):
    state = Partial.identity(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        if not last:
            ring.post(k, v)
        state = merge(state, ring.compute("attend", attend, q, k, v))
    return state.out, state.lse
