# expects: check=06.overlap:values misconception=reads_before_waiting
"""Goes on with the buffers, and waits for everything at the end."""

import math

import torch

from ringlab.blocks import get_block
from ringlab.merge import Partial, merge


def attend(q, k, v):
    return get_block("naive", q).forward(q, k, v, causal=False, scale=1 / math.sqrt(q.shape[-1]))


def overlapped_ring(ring, q, k, v):
    state, works = Partial.identity(q), []
    for step in range(ring.world_size):
        coming = torch.empty_like(k), torch.empty_like(v)
        if step < ring.world_size - 1:
            works.append(ring.post(k, v, into=coming))
        state = merge(state, ring.compute("attend", attend, q, k, v))
        k, v = coming
    for work in works:
        work.wait()
    return state.out, state.lse
