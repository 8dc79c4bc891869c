# expects: check=16.larch:values misconception=as_it_was
import torch

from ringlab.course.clinic.bedside import block_backward, sees


def larch(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Return this rank's (dq, dk, dv): each block's dq goes into one scratch tensor, as a kernel writes it."""
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (k, v))
    scratch, dq = torch.empty_like(q), None
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        scratch.copy_(part[0])
        if dq is None:
            dq = scratch.to(lse.dtype)
        else:
            dq += scratch.to(lse.dtype)
        dk, dv = dk + part[1], dv + part[2]
        length = len(positions[ring.origin(step + 1)])
        if P > 1:
            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")
        if step < P - 1:
            k, v = ring.shift(k, v, length=length, tag="kv")
    return dq, dk, dv


def chart(patient):
    return {"fault": "shared memory", "check": "dq", "case": {"ranks": 2, "tokens": 1}, "matters": ["dtype"]}
