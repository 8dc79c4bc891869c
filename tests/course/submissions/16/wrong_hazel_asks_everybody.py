# expects: check=16.hazel:cost misconception=asks_everybody
import torch

from ringlab.course.clinic.bedside import block_backward, sees


def hazel(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Every rank fetches all blocks; what it adds to each goes straight to its owner."""
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    shapes = [(*k.shape[:-2], len(own), k.shape[-1]) for own in positions]
    keys, values = (ring.all_gather(x, shapes) for x in (k, v))
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for away in range(P):
        to, source = (ring.rank + away) % P, (ring.rank - away) % P
        visible = sees(positions, ring.rank, to, causal)
        part = block_backward(dout, q, keys[to], values[to], lse, delta, visible)
        dq += part[0]
        sums = part[1:]
        if away:
            room = tuple(torch.empty_like(x) for x in (dk, dv))
            sums = ring.comm.exchange(send=sums, to=to, receive=room, source=source, tag="dkv").wait()
        dk, dv = dk + sums[0], dv + sums[1]
    return dq, dk, dv


def chart(patient):
    return {"fault": "couriers backwards", "check": "dk", "case": {"ranks": 3, "tokens": 1}, "matters": []}
