"""K/V heads one after the other; keys that a stretch of rows may see are taken by index; gradients of a tile by autograd."""


def owned(layout, S, P):
    def owner(i):
        if layout == "striped":
            return i % P
        if layout == "contiguous":
            return i // math.ceil(S / P)
        piece = i // math.ceil(S / (2 * P))
        return piece if piece < P else 2 * P - 1 - piece

    found = [[] for _ in range(P)]
    for i in range(S):
        found[owner(i)].append(i)
    return [torch.tensor(places, dtype=torch.int64) for places in found]


def attend_block(q, k, v, q_positions, k_positions, causal=True, scale=None):
    dtype = torch.promote_types(q.dtype, torch.float32)
    outs, lses, group = [], [], q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        scores = q[:, head].to(dtype) @ k[:, head // group].to(dtype).mT
        scores = scores * (scale if scale is not None else q.shape[-1] ** -0.5)
        if causal:
            scores = scores + torch.zeros(scores.shape[-2:], dtype=dtype).masked_fill(
                q_positions[:, None] < k_positions, -math.inf
            )
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)  # −inf − (−inf): a row without keys
        outs.append(weights @ v[:, head // group].to(dtype))
        lses.append(lse)
    return torch.stack(outs, 1), torch.stack(lses, 1)


def merge(out, lse, new_out, new_lse):
    both = torch.stack((lse, new_lse))
    shares = torch.softmax(both, 0).nan_to_num(0.0)[..., None]
    return shares[0] * out + shares[1] * new_out, both.logsumexp(0)


def rows_of(places):
    """Each stretch of rows, by index."""
    found, last = [], None
    for i, place in enumerate(places.tolist()):
        jump = found and len(found[-1]) > 1 and place - last != places[found[-1][1]] - places[found[-1][0]]
        if not found or jump:
            found.append([])
        found[-1].append(i)
        last = place
    return [torch.tensor(rows) for rows in found]


def seen_by(mine, here, rows, causal):
    if not causal:
        return torch.arange(len(here))
    return torch.nonzero(here <= mine[rows].max()).flatten()


def ring_forward(ring, q, k, v, positions, causal=True, scale=None):
    mine, state = positions[ring.rank], None
    for step in range(ring.world_size):
        if step:
            k, v = ring.shift(k, v, length=len(positions[ring.origin(step)]))
        here = positions[ring.origin(step)]
        parts = attend_block(q, k[:, :, :0], v[:, :, :0], mine, here[:0], causal, scale)
        for rows in rows_of(mine):
            keys = seen_by(mine, here, rows, causal)
            tile = attend_block(q[:, :, rows], k[:, :, keys], v[:, :, keys], mine[rows], here[keys], causal, scale)
            for whole, part in zip(parts, tile):
                whole[:, :, rows] = part
        state = parts if state is None else merge(*state, *parts)
    return state[0].to(q.dtype), state[1]


def ring_backward(ring, dout, q, k, v, out, lse, positions, causal=True, scale=None):
    mine, dtype, group = positions[ring.rank], lse.dtype, q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    finite = lse.masked_fill(torch.isinf(lse), math.inf)
    dq, couriers = torch.zeros(q.shape, dtype=dtype), None
    for step in range(ring.world_size):
        here, due = positions[ring.origin(step)], len(positions[ring.origin(step + 1)])
        block = ring.post(k, v, length=due) if step < ring.world_size - 1 else None
        dk, dv = torch.zeros(k.shape, dtype=dtype), torch.zeros(v.shape, dtype=dtype)
        for rows in rows_of(mine):
            keys = seen_by(mine, here, rows, causal)
            for head in range(q.shape[1]):
                with torch.enable_grad():
                    a, b, c = (
                        x.to(dtype).detach().requires_grad_()
                        for x in (q[:, head, rows], k[:, head // group, keys], v[:, head // group, keys])
                    )
                    scores = scale * (a @ b.mT)
                    if causal:
                        scores = scores.masked_fill(here[keys] > mine[rows][:, None], -math.inf)
                    weights = torch.exp(scores - finite[:, head, rows, None])
                    upstream = dout[:, head, rows].to(dtype)
                    # d/d(scores) of Σ p·(dO·v − delta), with p's own derivative: the delta term is a constant per row
                    loss = (weights * ((upstream @ c.mT) - delta[:, head, rows, None])).sum()
                    inner = (upstream @ c.detach().mT) - delta[:, head, rows, None]
                    da, db = torch.autograd.grad((weights * inner).sum(), (a, b), retain_graph=True)
                    (dc,) = torch.autograd.grad(loss, c)
                dq[:, head, rows] += da
                dk[:, head // group, keys] += db
                dv[:, head // group, keys] += dc
        if couriers is not None:
            dk, dv = (x + y for x, y in zip((dk, dv), couriers.wait()))
        if ring.world_size > 1:
            couriers = ring.post(dk, dv, length=due)
        if block is not None:
            k, v = block.wait()
    if couriers is not None:
        dk, dv = couriers.wait()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
