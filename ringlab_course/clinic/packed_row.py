"""A sound loss of a packed row and its small model. The four patients from the field are edits of it.

The model is an embedding, one layer of attention with rotated queries and keys, and the embedding again, in float64.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional as F

from ringlab.layout import get_layout
from ringlab_course.clinic.bedside import attend, nothing_seen, sees

IGNORE = -100
"""The label of a token that does not count."""
VOCABULARY, HEADS, D = 32, 2, 4
_draw = np.random.default_rng(16).standard_normal
EMBEDDING = torch.from_numpy(_draw((VOCABULARY, HEADS * D)))
PROJECTION = torch.from_numpy(_draw((HEADS * D, 3 * HEADS * D))) / (HEADS * D) ** 0.5
SPEEDS = 10.0 ** -torch.arange(D // 2, dtype=torch.float64)
"""The radians per token by which each pair of head dims is rotated."""


def shards(S, P):
    """Return the positions of each rank's tokens in a zig-zag layout, a list with one entry per rank."""
    layout = get_layout("zigzag", S, P)
    return [torch.from_numpy(layout.positions(rank)) for rank in range(P)]


def next_labels(labels):
    """Return the label that each token predicts: that of the next token, and IGNORE for the last token."""
    return F.pad(labels, (0, 1), value=IGNORE)[:, 1:]


def projected(tokens):
    """Return q, k and v of these tokens, each (B, H, L, D)."""
    x = EMBEDDING[tokens] @ PROJECTION
    return x.unflatten(-1, (3, HEADS, D)).permute(2, 0, 3, 1, 4).unbind(0)


def rotated(x, positions):
    """Return x with each pair of head dims rotated by an angle that grows with the position."""
    angles = positions[:, None] * SPEEDS
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


def summed_loss(out, targets):
    """Return the sum of −log p over the targets that count."""
    logits = out.transpose(1, 2).flatten(2) @ EMBEDDING.mT
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def loss(ring, tokens, labels, cu_seqlens=None):
    """Return the mean loss over the labels that count, on every rank; each has all tokens and labels."""
    P, S = ring.world_size, tokens.shape[1]
    bounds = torch.tensor([0, S]) if cu_seqlens is None else cu_seqlens
    positions = shards(S, P)
    own = positions[ring.rank]
    documents = [torch.bucketize(each, bounds, right=True) for each in positions]
    targets = next_labels(labels)[:, own]
    q, k, v = projected(tokens[:, own])
    q, k = rotated(q, own), rotated(k, own)
    out, lse = nothing_seen(q)
    for step in range(P):
        origin = ring.origin(step)
        visible = sees(positions, ring.rank, origin)
        visible &= documents[ring.rank][:, None] == documents[origin]
        block_out, block_lse = attend(q, k, v, visible, *nothing_seen(q))
        total = torch.logaddexp(lse, block_lse)
        safe = total.masked_fill(total == -math.inf, 0.0)[..., None]
        out = out * torch.exp(lse[..., None] - safe) + block_out * torch.exp(block_lse[..., None] - safe)
        lse = total
        if step < P - 1:
            k, v = ring.shift(k, v, length=len(positions[ring.origin(step + 1)]))
    count = (targets != IGNORE).sum()
    return ring.all_reduce(summed_loss(out, targets)) / ring.all_reduce(count)
