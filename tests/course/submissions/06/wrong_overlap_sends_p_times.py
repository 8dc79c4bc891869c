# expects: check=06.overlap:traffic misconception=sends_p_times
"""P hops: the last block goes home."""

import math

from ringlab.blocks import get_block
from ringlab.merge import Partial, merge


def attend(q, k, v):
    return get_block("naive", q).forward(q, k, v, causal=False, scale=1 / math.sqrt(q.shape[-1]))


def overlapped_ring(ring, q, k, v):
    state = Partial.identity(q)
    for _ in range(ring.world_size):
        work = ring.post(k, v)
        state = merge(state, ring.compute("attend", attend, q, k, v))
        k, v = work.wait()
    return state.out, state.lse
