"""As the exercise suggests it."""

import math

import torch

from ringlab.merge import Partial, merge


def bounds_of(position_ids):
    first = position_ids == 0
    starts = torch.nonzero(first).flatten()
    end = torch.tensor([len(position_ids)])
    return torch.cat([starts, end]).to(torch.int32), first.cumsum(0) - 1


def shard_packed(tokens, cu_seqlens, own):
    bounds = cu_seqlens.long()
    lengths = bounds.diff()
    labels = torch.cat([tokens[1:], tokens.new_full((1,), -100)])
    labels[bounds[1:][lengths > 0] - 1] = -100
    positions = torch.arange(len(tokens)) - bounds[:-1].repeat_interleave(lengths)
    return tokens[own], labels[own], positions[own]


def attend(q, k, v, visible):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    safe = lse.masked_fill(lse == -math.inf, 0.0)
    return Partial(torch.exp(scores - safe[..., None]) @ v, lse)


def packed_ring(ring, q, k, v, places, cu_seqlens):
    lengths = cu_seqlens.long().diff()
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    state, rows = Partial.identity(q), places[ring.rank]
    for step in range(ring.world_size):
        keys = places[ring.origin(step)]
        visible = (document[rows][:, None] == document[keys]) & (rows[:, None] >= keys)
        if visible.any():
            part = ring.compute(f"attend {step}", attend, q, k, v, visible)
            state = merge(state, part)
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v, length=len(places[ring.origin(step + 1)]))
    return state.out, state.lse


def token_weights(ring, counted, documents, n):
    own = torch.bincount(documents[counted], minlength=n)
    total = ring.all_reduce(own)
    present = (total > 0).sum()
    return counted / (total[documents].clamp(min=1) * present)
