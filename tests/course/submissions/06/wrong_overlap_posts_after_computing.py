# expects: check=06.overlap:order misconception=posts_after_computing
"""Computes, then shifts: lesson 05's first ring."""

import math

from ringlab.blocks import get_block
from ringlab.merge import Partial, merge


def attend(q, k, v):
    return get_block("naive", q).forward(q, k, v, causal=False, scale=1 / math.sqrt(q.shape[-1]))


def overlapped_ring(ring, q, k, v):
    state = Partial.identity(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        state = merge(state, ring.compute("attend", attend, q, k, v))
        if not last:
            k, v = ring.shift(k, v)
    return state.out, state.lse
