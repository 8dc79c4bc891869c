"""Heads repeated where they are used, sums in new tensors."""


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
    P, mine = ring.world_size, positions[ring.rank]
    delta = row_delta(dout, out)
    dq, courier = torch.zeros(q.shape, dtype=lse.dtype), None
    for step in range(P):
        due = len(positions[ring.origin(step + 1)])
        blocks = ring.post(k, v, length=due) if step < P - 1 else None
        distance = mine[:, None] - positions[ring.origin(step)][None, :]
        mask = (distance >= 0) & (distance < window)
        if mask.any():
            part, dk, dv = ring.compute(f"attend backward {step}", block_backward, dout, q, k, v, lse, delta, mask)
        else:
            part, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
        dq += part
        if courier is not None:
            dk_before, dv_before = courier.wait()
            dk, dv = dk_before + dk, dv_before + dv
        if P > 1:
            courier = ring.post(dk, dv, length=due)
        if blocks is not None:
            k, v = blocks.wait()
    if courier is not None:
        dk, dv = courier.wait()
    return dq, dk, dv


def bytes_sent(lengths, rank, B, K, D, itemsize):
    P = len(lengths)
    if P == 1:
        return 0, 0
    token = 2 * B * K * D
    blocks = token * itemsize * sum(lengths[(rank - step) % P] for step in range(P - 1))
    return blocks, blocks + token * max(4, itemsize) * sum(lengths)
