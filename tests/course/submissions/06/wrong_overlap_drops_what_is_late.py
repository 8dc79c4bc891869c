# expects: check=06.overlap:any_network misconception=looks_at_the_clock
"""Does without a block that takes too long, so that nobody waits for a straggler."""

import math

from ringlab.blocks import get_block
from ringlab.merge import Partial, merge


def attend(q, k, v):
    return get_block("naive", q).forward(q, k, v, causal=False, scale=1 / math.sqrt(q.shape[-1]))


def overlapped_ring(ring, q, k, v):
    state, in_time = Partial.identity(q), True
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v)
        if in_time:
            state = merge(state, ring.compute("attend", attend, q, k, v))
        if work:
            begin = ring.comm.now()
            k, v = work.wait()
            in_time = ring.comm.now() - begin < 1.0
    return state.out, state.lse
