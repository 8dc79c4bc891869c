"""Nothing of the helpers: own masks, one division at the end, one tensor for both couriers."""

import math

import torch


CHARTS = {
    "ash": {"fault": "blind rows", "check": "blind rows", "case": {"ranks": 2, "tokens": 2, "layout": "striped"}, "matters": ["layout", "causal"]},
    "birch": {"fault": "lost sum", "check": "forward", "case": {"ranks": 3, "tokens": 1}, "matters": []},
    "cedar": {"fault": "masks by rank", "check": "masks", "case": {"ranks": 2, "tokens": 2, "layout": "striped"}, "matters": ["layout", "causal"]},
    "elm": {"fault": "one hop too many", "check": "bytes", "case": {"ranks": 2, "tokens": 1}, "matters": []},
    "fir": {"fault": "keys as values", "check": "forward", "case": {"ranks": 2, "tokens": 1, "causal": False}, "matters": ["causal"]},
    "hazel": {"fault": "couriers backwards", "check": "masks", "case": dict(ranks=3, tokens=1, layout="zigzag"), "matters": ()},
    "larch": {"fault": "shared memory", "check": "large logits", "case": dict(ranks=2, tokens=1, layout="striped", causal=False), "matters": ("dtype",)},
    "oak": {"fault": "first block", "check": "dq", "case": {"ranks": 2, "tokens": 1}, "matters": []},
}


def chart(patient):
    return CHARTS.get(patient)


def weights_of(q, k, visible, lse=None):
    """exp(scores − max) or exp(scores − lse), the maximum, in float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bhid,bhjd->bhij", q.to(wide), k.to(wide)) / math.sqrt(q.shape[-1])
    scores = torch.where(visible, scores, -math.inf)
    top = lse if lse is not None else scores.amax(-1) if k.shape[-2] else scores.new_full(q.shape[:-1], -math.inf)
    return torch.exp(scores - torch.where(top == -math.inf, 0.0, top)[..., None]), top


def visible_to(ring, positions, step, causal):
    mine, theirs = positions[ring.rank], positions[ring.origin(step)]
    return theirs[None, :] <= mine[:, None] if causal else torch.ones(len(mine), len(theirs), dtype=torch.bool)


def unnormalised(ring, q, k, v, positions, causal=True):
    """Sums of weights and of weighted values against a running maximum; one division at the end."""
    wide = torch.promote_types(q.dtype, torch.float32)
    top = torch.full(q.shape[:-1], -math.inf, dtype=wide)
    total, values = torch.zeros_like(top), torch.zeros(q.shape, dtype=wide)
    for step in range(ring.world_size):
        weights, here = weights_of(q, k, visible_to(ring, positions, step, causal))
        both = torch.maximum(top, here)
        safe = torch.where(both == -math.inf, 0.0, both)
        old = torch.exp(top - safe)
        new = torch.exp(here - safe)
        total = total * old + weights.sum(-1) * new
        values = values * old[..., None] + weights @ v.to(wide) * new[..., None]
        top = both
        if step + 1 < ring.world_size:
            due = len(positions[ring.origin(step + 1)])
            k = ring.shift(k, length=due, tag="k")
            v = ring.shift(v, length=due, tag="v")
    lse = top + torch.log(total)
    return (values / torch.where(total > 0, total, 1.0)[..., None]).to(q.dtype), lse


def gradients(ring, dout, q, k, v, out, lse, positions, causal=True):
    """dK and dV as one tensor, which makes P hops."""
    wide, P = lse.dtype, ring.world_size
    delta = (dout.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    dq = torch.zeros(q.shape, dtype=wide)
    courier = torch.zeros((2, *k.shape), dtype=wide)
    for step in range(P):
        weights, _ = weights_of(q, k, visible_to(ring, positions, step, causal), lse)
        dscores = weights * (dout.to(wide) @ v.to(wide).mT - delta) / math.sqrt(q.shape[-1])
        dq = dq + dscores @ k.to(wide)
        courier = courier + torch.stack([dscores.mT @ q.to(wide), weights.mT @ dout.to(wide)])
        due = len(positions[ring.origin(step + 1)])
        if P > 1:
            courier = ring.shift(courier, length=due, tag="sums")
        if step < P - 1:
            k, v = ring.shift(k, v, length=due, tag="blocks")
    return dq, courier[0], courier[1]


ash = birch = cedar = elm = fir = unnormalised
hazel = larch = oak = gradients
