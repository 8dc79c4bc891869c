"""K and V stacked into one tensor, dK and dV too; a merge that goes from one part to the other by its share."""


def owned(layout, S, P):
    """Return the positions of each rank's tokens."""
    token, pieces = torch.arange(S), {"contiguous": P, "striped": S, "zigzag": 2 * P}[layout]
    piece = token // max(1, math.ceil(S / max(1, pieces)))
    owner = {"contiguous": piece, "striped": piece % P, "zigzag": torch.minimum(piece, 2 * P - 1 - piece)}[
        layout
    ]
    return [torch.nonzero(owner == rank).flatten() for rank in range(P)]


def merge(out, lse, new_out, new_lse):
    """Return the partial result over the keys of both."""
    total = torch.logaddexp(lse, new_lse)
    share = torch.where(total == -math.inf, 0.0, torch.exp(new_lse - total))[..., None]
    return torch.lerp(out, new_out, share), total


def ring_forward(ring, q, k, v, positions, causal=True, scale=None):
    """Return this rank's (out, lse)."""
    def stretches(places):
        """Rows whose positions rise by the same step: such a stretch is before, after or across another."""
        steps = places.diff()
        cuts = (torch.nonzero(steps > steps.min()).flatten() + 1).tolist() if len(steps) else []
        return [rows for rows in torch.arange(len(places)).tensor_split(cuts) if len(rows)]

    mine = positions[ring.rank]
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    lse = torch.full(q.shape[:-1], -math.inf, dtype=out.dtype)
    for step in range(ring.world_size):
        here, last = positions[ring.origin(step)], step == ring.world_size - 1
        coming = None if last else ring.post(torch.cat((k, v), 1), length=len(positions[ring.origin(step + 1)]))
        for rows in stretches(mine):
            seen = here <= mine[rows].max() if causal else torch.ones_like(here, dtype=torch.bool)
            if not seen.any():
                continue
            tile = q[:, :, rows], k[:, :, seen], v[:, :, seen], mine[rows], here[seen]
            merged = merge(out[:, :, rows], lse[:, :, rows], *attend_block(*tile, causal, scale))
            out[:, :, rows], lse[:, :, rows] = merged
        if coming is not None:
            k, v = coming.wait()[0].chunk(2, 1)
    return out.to(q.dtype), lse


def ring_backward(ring, dout, q, k, v, out, lse, positions, causal=True, scale=None):
    """Return this rank's (dq, dk, dv)."""
    def stretches(places):
        steps = places.diff()
        cuts = (torch.nonzero(steps > steps.min()).flatten() + 1).tolist() if len(steps) else []
        return [rows for rows in torch.arange(len(places)).tensor_split(cuts) if len(rows)]

    def tile(q, k, v, dout, lse, delta, hidden):
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
        coming = ring.post(torch.cat((k, v), 1), length=due) if step < P - 1 else None
        wide_k, wide_v = (x.to(lse.dtype) for x in (k, v))
        dk, dv = (torch.zeros_like(x) for x in (wide_k, wide_v))
        for rows in stretches(mine):
            seen = here <= mine[rows].max() if causal else torch.ones_like(here, dtype=torch.bool)
            hidden = (here[seen] > mine[rows, None]) & causal
            of_rows = (x[:, :, rows] for x in (dout, lse, delta))
            parts = tile(q[:, :, rows], wide_k[:, :, seen], wide_v[:, :, seen], *of_rows, hidden)
            for into, where, part in zip((dq, dk, dv), (rows, seen, seen), parts, strict=True):
                into[:, :, where] += part
        if courier is not None:
            dk, dv = (own.add_(arrived) for own, arrived in zip((dk, dv), courier.wait()[0].chunk(2, 1), strict=True))
        courier = ring.post(torch.cat((dk, dv), 1), length=due) if P > 1 else None
        k, v = (k, v) if coming is None else coming.wait()[0].chunk(2, 1)
    dk, dv = courier.wait()[0].chunk(2, 1) if P > 1 else (dk, dv)
    return tuple(x.to(dtype) for x, dtype in zip((dq, dk, dv), dtypes, strict=True))
