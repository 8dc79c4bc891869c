"""Two sound rings, posts ahead, couriers one hop behind, and other cases in the charts."""

import torch

from ringlab_course.clinic.bedside import attend, block_backward, nothing_seen, sees


CHARTS = {
    "ash": {"fault": "blind rows", "check": "masks", "case": {"ranks": 2, "tokens": 2, "layout": "zigzag"}, "matters": ["causal", "layout"]},
    "birch": {"fault": "lost sum", "check": "sloped logits", "case": {"ranks": 2, "tokens": 2, "causal": False}, "matters": []},
    "cedar": {"fault": "masks by rank", "check": "causality", "case": {"ranks": 2, "tokens": 2, "layout": "zigzag", "dtype": "bfloat16"}, "matters": ["layout", "causal"]},
    "elm": {"fault": "one hop too many", "check": "bytes", "case": {"ranks": 2, "tokens": 1}, "matters": []},
    "fir": {"fault": "keys as values", "check": "lse", "case": {"ranks": 3, "tokens": 1}, "matters": []},
    "hazel": {"fault": "couriers backwards", "check": "dv", "case": {"ranks": 3, "tokens": 1, "layout": "striped", "causal": False}, "matters": []},
    "larch": {"fault": "shared memory", "check": "dq", "case": {"ranks": 2, "tokens": 1}, "matters": ["dtype"]},
    "oak": {"fault": "first block", "check": "error growth", "case": {"ranks": 2, "tokens": 1, "dtype": "bfloat16"}, "matters": []},
}


def chart(patient):
    return CHARTS.get(patient)


def forward(ring, q, k, v, positions, causal):
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        work = None
        if step < ring.world_size - 1:
            work = ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        out, lse = attend(q, k, v, sees(positions, ring.rank, ring.origin(step), causal), out, lse)
        if work:
            k, v = work.wait()
    return out.to(q.dtype), lse


def backward(ring, dout, q, k, v, out, lse, positions, causal):
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, courier = torch.zeros(q.shape, dtype=lse.dtype), None
    for step in range(P):
        due = len(positions[ring.origin(step + 1)])
        blocks = ring.post(k, v, length=due) if step < P - 1 else None
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part, *sums = block_backward(dout, q, k, v, lse, delta, visible)
        dq += part
        if courier:
            sums = [own + arrived for own, arrived in zip(sums, courier.wait(), strict=True)]
        if P > 1:
            courier = ring.post(*sums, length=due)
        if blocks:
            k, v = blocks.wait()
    return dq, *(courier.wait() if courier else sums)


def ash(ring, q, k, v, positions, causal=True):
    return forward(ring, q, k, v, positions, causal)


def birch(ring, q, k, v, positions, causal=True):
    return forward(ring, q, k, v, positions, causal)


def cedar(ring, q, k, v, positions, causal=True):
    return forward(ring, q, k, v, positions, causal)


def elm(ring, q, k, v, positions, causal=True):
    return forward(ring, q, k, v, positions, causal)


def fir(ring, q, k, v, positions, causal=True):
    return forward(ring, q, k, v, positions, causal)


def hazel(ring, dout, q, k, v, out, lse, positions, causal=True):
    return backward(ring, dout, q, k, v, out, lse, positions, causal)


def larch(ring, dout, q, k, v, out, lse, positions, causal=True):
    return backward(ring, dout, q, k, v, out, lse, positions, causal)


def oak(ring, dout, q, k, v, out, lse, positions, causal=True):
    return backward(ring, dout, q, k, v, out, lse, positions, causal)
