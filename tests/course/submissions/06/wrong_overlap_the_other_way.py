# expects: check=06.overlap:traffic misconception=wrong_direction
"""Blocks go to the previous rank."""

import math

import torch

from ringlab.blocks import get_block
from ringlab.merge import Partial, merge


def attend(q, k, v):
    return get_block("naive", q).forward(q, k, v, causal=False, scale=1 / math.sqrt(q.shape[-1]))


def overlapped_ring(ring, q, k, v):
    state = Partial.identity(q)
    for step in range(ring.world_size):
        work = None
        if step < ring.world_size - 1:
            into = (torch.empty_like(k), torch.empty_like(v))
            work = ring.comm.exchange(send=(k, v), to=ring.previous, receive=into, source=ring.next)
        state = merge(state, ring.compute("attend", attend, q, k, v))
        if work:
            k, v = work.wait()
    return state.out, state.lse
