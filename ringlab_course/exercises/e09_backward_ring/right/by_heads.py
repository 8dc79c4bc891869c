"""One head at a time, with einsum; couriers start as zeros; the transport's own exchange."""


def row_delta(dout, out):
    return torch.einsum("bhld,bhld->bhl", dout.to(out.dtype), out)


def block_backward(dout, q, k, v, lse, delta, mask=None):
    group, dtype = q.shape[1] // k.shape[1], lse.dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
    for h in range(q.shape[1]):
        one = q[:, h].to(dtype) / q.shape[-1] ** 0.5, k[:, h // group].to(dtype), v[:, h // group].to(dtype), dout[:, h].to(dtype)
        heads = _one_head(*one, lse[:, h], delta[:, h], mask)
        dq[:, h] = heads[0] / q.shape[-1] ** 0.5
        dk[:, h // group] += heads[1]
        dv[:, h // group] += heads[2]
    return dq, dk, dv


def _one_head(q, k, v, dout, lse, delta, mask):
    """q comes scaled; dk needs no factor then."""
    weights = torch.exp(torch.einsum("bid,bjd->bij", q, k) - lse[..., None])
    seen = torch.isfinite(lse)[..., None] if mask is None else mask & torch.isfinite(lse)[..., None]
    weights = torch.where(seen, weights, 0.0)
    dscores = weights * (torch.einsum("bid,bjd->bij", dout, v) - delta[..., None])
    return (
        torch.einsum("bij,bjd->bid", dscores, k),
        torch.einsum("bij,bid->bjd", dscores, q),
        torch.einsum("bij,bid->bjd", weights, dout),
    )


def ring_backward(ring, dout, q, k, v, out, lse, positions, window):
    P, delta = ring.world_size, row_delta(dout, out)
    dq = torch.zeros(q.shape, dtype=lse.dtype)
    sums, work = [torch.zeros(x.shape, dtype=lse.dtype) for x in (k, v)], None

    def send(tensors, tag, tokens):
        into = [t.new_empty((*t.shape[:2], tokens, t.shape[3])) for t in tensors]
        return ring.comm.exchange(send=tensors, to=ring.next, receive=into, source=ring.previous, tag=tag)

    for step in range(P):
        coming = len(positions[(ring.rank - step - 1) % P])
        blocks = send((k, v), "blocks", coming) if step + 1 < P else None
        here = positions[(ring.rank - step) % P]
        mask = torch.tensor([[0 <= i - j < window for j in here.tolist()] for i in positions[ring.rank].tolist()])
        found = ring.compute("backward", block_backward, dout, q, k, v, lse, delta, mask) if mask.any() else None
        if work:
            sums = work.wait()
        if found:
            dq = dq + found[0]
            sums = [total + own for total, own in zip(sums, found[1:], strict=True)]
        work = send(sums, "couriers", coming) if P > 1 else None
        if blocks:
            k, v = blocks.wait()
    return (dq, *(work.wait() if work else sums))


def bytes_sent(lengths, rank, B, K, D, itemsize):
    P, S = len(lengths), sum(lengths)
    vector = 2 * B * K * D
    blocks = itemsize * vector * (S - lengths[(rank + 1) % P])
    couriers = max(4, itemsize) * vector * S
    return (blocks, blocks + couriers) if P > 1 else (0, 0)
