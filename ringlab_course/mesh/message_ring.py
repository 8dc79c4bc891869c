"""The ring with messages, as in lesson 05: lesson 17 draws it beside the same ring on a mesh, line by line."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringlab.comm.ring import Ring
from ringlab.layout import Layout
from ringlab.merge import Partial, merge


def message_ring(ring: Ring, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of this rank's queries over the keys of all ranks, causal in global positions."""
    state = Partial.identity(q)
    for step in range(layout.P):
        mask = sees(ring, layout, step)
        here = attend(q, k, v, mask)
        state = merge(state, here)
        if step < layout.P - 1:
            k, v = ring.shift(k, v)
    return state.out, state.lse


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Partial:
    """Return attention of q on one block; a row that sees nothing gives 0 and −inf."""
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(-1)
    finite = lse.masked_fill(lse == -math.inf, 0)[..., None]
    return Partial(torch.exp(scores - finite) @ v, lse)


def sees(ring: Ring, layout: Layout, step: int) -> Tensor:
    """Return True where this rank's queries see the keys that are here after `step` shifts."""
    own, origin = layout.positions(ring.rank), layout.positions(ring.origin(step))
    return torch.from_numpy(own[:, None] >= origin)
