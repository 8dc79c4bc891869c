"""Receive buffers made once for equal shards and used in turn."""


def block_backward(dout, q, k, v, lse, delta, mask=None):
    scale, group = q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    dout, q, k, v = (x.to(lse.dtype) for x in (dout, q, k, v))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = scale * (q @ k.mT)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    safe = lse.masked_fill(lse == -math.inf, math.inf)[..., None]
    weights = torch.exp(scores - safe)
    dscores = weights * (dout @ v.mT - delta[..., None])
    dq, dk, dv = scale * dscores @ k, scale * dscores.mT @ q, weights.mT @ dout
    return dq, dk.unflatten(1, (-1, group)).sum(2), dv.unflatten(1, (-1, group)).sum(2)


def ring_backward(ring, dout, q, k, v, out, lse, positions, window):
    P, delta = ring.world_size, row_delta(dout, out)
    dq, courier = torch.zeros(q.shape, dtype=lse.dtype), None
    equal = len({len(own) for own in positions}) == 1
    spare = [tuple(torch.empty(x.shape, dtype=lse.dtype) for x in (k, v)) for _ in range(2 * equal)]
    for step in range(P):
        due = len(positions[ring.origin(step + 1)])
        blocks = ring.post(k, v, length=due) if step < P - 1 else None
        behind = positions[ring.rank][:, None] - positions[ring.origin(step)][None, :]
        mask = (behind >= 0).logical_and(behind < window)
        sums = [torch.zeros(x.shape, dtype=lse.dtype) for x in (k, v)]
        if mask.any():
            part, *sums = ring.compute("block", block_backward, dout, q, k, v, lse, delta, mask)
            dq += part
        if courier is not None:
            sums = [arrived.add_(own) for arrived, own in zip(courier.wait(), sums, strict=True)]
        if P > 1:
            into = spare[step % 2] if equal else None
            courier = ring.post(*sums, length=due, into=into)
        if blocks is not None:
            k, v = blocks.wait()
    return (dq, *sums) if courier is None else (dq, *courier.wait())


def bytes_sent(lengths, rank, B, K, D, itemsize):
    P = len(lengths)
    if P == 1:
        return 0, 0
    token = 2 * B * K * D
    blocks = token * itemsize * sum(lengths[(rank - step) % P] for step in range(P - 1))
    return blocks, blocks + token * max(4, itemsize) * sum(lengths)
