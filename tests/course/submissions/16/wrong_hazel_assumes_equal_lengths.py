# expects: check=16.hazel:any misconception=assumes_equal_lengths
import torch

from ringlab.course.clinic.bedside import block_backward, sees


def hazel(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Return this rank's (dq, dk, dv)."""
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        if P > 1:
            dk, dv = ring.shift(dk, dv, tag="dkv")
        if step < P - 1:
            k, v = ring.shift(k, v, tag="kv")
    return dq, dk, dv


def chart(patient):
    return {"fault": "couriers backwards", "check": "dk", "case": {"ranks": 3, "tokens": 1}, "matters": []}
