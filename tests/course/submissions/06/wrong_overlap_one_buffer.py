# expects: check=06.overlap:values misconception=one_buffer
"""Saves the second pair of buffers."""

import math

from ringlab.blocks import get_block
from ringlab.merge import Partial, merge


def attend(q, k, v):
    return get_block("naive", q).forward(q, k, v, causal=False, scale=1 / math.sqrt(q.shape[-1]))


def overlapped_ring(ring, q, k, v):
    state = Partial.identity(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, into=(k, v))
        state = merge(state, ring.compute("attend", attend, q, k, v))
        if work:
            k, v = work.wait()
    return state.out, state.lse
