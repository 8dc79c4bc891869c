"""K and V in one tensor, dK and dV in one; the couriers add in place into what has arrived."""


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
    block, dq, courier, total = torch.stack([k, v]), torch.zeros(q.shape, dtype=lse.dtype), None, None
    for step in range(P):
        due = len(positions[ring.origin(step + 1)])
        onward = ring.post(block, length=due, tag=f"kv {step}") if step < P - 1 else None
        rows, keys = positions[ring.rank].unsqueeze(1), positions[ring.origin(step)]
        mask = (keys <= rows) & (rows < keys + window)
        own = torch.zeros(block.shape, dtype=lse.dtype)
        if bool(mask.any()):
            part, *own = ring.compute(f"step {step}", block_backward, dout, q, block[0], block[1], lse, delta, mask)
            dq.add_(part)
        if courier is None:
            total = torch.stack(list(own))
        else:
            (total,) = courier.wait()
            total[0] += own[0]
            total[1] += own[1]
        if P > 1:
            courier = ring.post(total, length=due, tag=f"dkv {step}")
        if onward is not None:
            (block,) = onward.wait()
    if courier is not None:
        (total,) = courier.wait()
    return dq, total[0], total[1]


def bytes_sent(lengths, rank, B, K, D, itemsize):
    P = len(lengths)
    if P == 1:
        return 0, 0
    token = 2 * B * K * D
    blocks = token * itemsize * sum(lengths[(rank - step) % P] for step in range(P - 1))
    return blocks, blocks + token * max(4, itemsize) * sum(lengths)
