# expects: check=18.backward:tiles misconception=cleans_hidden_tiles
import math

import torch


def ring_backward(ring, dout, q, k, v, out, lse, positions, causal=True, scale=None):
    """Return this rank's (dq, dk, dv)."""
    def stretches(places):
        steps = places.diff()
        cuts = (torch.nonzero(steps > steps.min()).flatten() + 1).tolist() if len(steps) else []
        return [rows for rows in torch.arange(len(places)).tensor_split(cuts) if len(rows)]

    def tile(q, k, v, dout, lse, delta, hidden):
        """What some rows and some keys add to (dq, dk, dv)."""
        shared = k.shape[1], q.shape[1] // k.shape[1]
        q, dout, lse, delta = (x.unflatten(1, shared) for x in (q, dout, lse, delta))
        k, v = k[:, :, None], v[:, :, None]
        weights = torch.exp((scale * (q @ k.mT)).masked_fill(hidden, -math.inf) - lse[..., None])
        dscores = scale * weights * (dout @ v.mT - delta[..., None])
        return (dscores @ k).flatten(1, 2), (dscores.mT @ q).sum(2), (weights.mT @ dout).sum(2)

    P, mine, dtypes = ring.world_size, positions[ring.rank], (q.dtype, k.dtype, v.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, dout, out = (x.to(lse.dtype) for x in (q, dout, out))
    delta, dq, courier = (dout * out).sum(-1), torch.zeros_like(q), None
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # rows without keys: all their weights are 0
    for step in range(P):
        here, due = positions[ring.origin(step)], len(positions[ring.origin(step + 1)])
        coming = ring.post(k, v, length=due) if step < P - 1 else None
        wide_k, wide_v = (x.to(lse.dtype).nan_to_num() for x in (k, v))
        dk, dv = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
        for rows in stretches(mine):
            seen = torch.ones_like(here, dtype=torch.bool)
            hidden = (here[seen] > mine[rows, None]) & causal
            of_rows = (x[:, :, rows] for x in (dout, lse, delta))
            parts = tile(q[:, :, rows], wide_k[:, :, seen], wide_v[:, :, seen], *of_rows, hidden)
            for into, where, part in zip((dq, dk, dv), (rows, seen, seen), parts, strict=True):
                into[:, :, where] += part
        if courier is not None:
            dk, dv = (own.add_(arrived) for own, arrived in zip((dk, dv), courier.wait(), strict=True))
        courier = ring.post(dk, dv, length=due) if P > 1 else None
        k, v = (k, v) if coming is None else coming.wait()
    dk, dv = (dk, dv) if courier is None else courier.wait()
    return tuple(x.to(dtype) for x, dtype in zip((dq, dk, dv), dtypes, strict=True))
