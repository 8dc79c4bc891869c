# expects: check=06.overlap:values misconception=sends_own_block_again
"""Posts the rank's own block every time."""

import math

from ringlab.blocks import get_block
from ringlab.merge import Partial, merge


def attend(q, k, v):
    return get_block("naive", q).forward(q, k, v, causal=False, scale=1 / math.sqrt(q.shape[-1]))


def overlapped_ring(ring, q, k, v):
    own, state = (k, v), Partial.identity(q)
    for step in range(ring.world_size):
        work = ring.post(*own) if step < ring.world_size - 1 else None
        state = merge(state, ring.compute("attend", attend, q, k, v))
        if work:
            k, v = work.wait()
    return state.out, state.lse
