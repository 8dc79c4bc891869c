# expects: check=16.hazel:values misconception=as_it_was
import torch

from ringlab.course.clinic.bedside import block_backward, sees


def hazel(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Return this rank's (dq, dk, dv): blocks go forward; gradients go back to where they came from."""
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        length = len(positions[ring.origin(step + 1)])
        if P > 1:
            room = tuple(x.new_empty((*x.shape[:-2], length, x.shape[-1])) for x in (dk, dv))
            back = ring.comm.exchange(
                send=(dk, dv), to=ring.previous, receive=room, source=ring.next, tag="dkv"
            )
            dk, dv = back.wait()
        if step < P - 1:
            k, v = ring.shift(k, v, length=length, tag="kv")
    return dq, dk, dv


def chart(patient):
    return {"fault": "couriers backwards", "check": "dk", "case": {"ranks": 3, "tokens": 1}, "matters": []}
