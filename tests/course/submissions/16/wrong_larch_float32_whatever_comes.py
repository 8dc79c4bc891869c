# expects: check=16.larch:any misconception=float32_whatever_comes
import torch

from ringlab.course.clinic.bedside import block_backward, sees


def larch(ring, dout, q, k, v, out, lse, positions, causal=True):
    """A sum of its own, but float32 whatever comes in."""
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (k, v))
    dq = torch.zeros(q.shape, dtype=torch.float32)
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        dq += part[0].float()
        dk, dv = dk + part[1], dv + part[2]
        length = len(positions[ring.origin(step + 1)])
        if P > 1:
            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")
        if step < P - 1:
            k, v = ring.shift(k, v, length=length, tag="kv")
    return dq, dk, dv


def chart(patient):
    return {"fault": "shared memory", "check": "dq", "case": {"ranks": 2, "tokens": 1}, "matters": ["dtype"]}
