# expects: check=16.oak:values misconception=as_it_was
import torch

from ringlab.course.clinic.bedside import block_backward, sees


def oak(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Return this rank's (dq, dk, dv): the next block is under way while this one is computed."""
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    block = k, v
    for step in range(P):
        length = len(positions[ring.origin(step + 1)])
        work = ring.post(*block, length=length, tag="kv") if step < P - 1 else None
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        if P > 1:
            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")
        if work is not None:
            block = work.wait()
    return dq, dk, dv


def chart(patient):
    return {"fault": "first block", "check": "dq", "case": {"ranks": 2, "tokens": 1}, "matters": []}
