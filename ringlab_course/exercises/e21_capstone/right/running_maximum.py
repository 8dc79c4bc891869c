"""A running maximum and a sum in place of an lse; K, V, dK and dV each in a message of its own; stretches found by hand."""


def owned(layout, S, P):
    if layout == "striped":
        return [torch.arange(min(rank, S), S, P) for rank in range(P)]
    pieces = P if layout == "contiguous" else 2 * P
    size = max(1, -(-S // pieces))
    piece = [torch.arange(min(S, i * size), min(S, (i + 1) * size)) for i in range(pieces)]
    if layout == "contiguous":
        return piece
    return [torch.cat((piece[rank], piece[2 * P - 1 - rank])) for rank in range(P)]


def wide(x):
    return x.double() if x.dtype == torch.float64 else x.float()


def raw(q, k, q_positions, k_positions, causal, scale):
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.einsum("bhid,bhjd->bhij", wide(q), wide(k).repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    if causal:
        scores = torch.where(q_positions[:, None] >= k_positions[None, :], scores, -math.inf)
    return scores


def attend_block(q, k, v, q_positions, k_positions, causal=True, scale=None):
    scores = raw(q, k, q_positions, k_positions, causal, scale)
    if not scores.shape[-1]:
        return torch.zeros_like(wide(q)), torch.full(scores.shape[:-1], -math.inf, dtype=scores.dtype)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    out = weights @ wide(v).repeat_interleave(q.shape[1] // v.shape[1], 1) / torch.where(total == 0, 1.0, total)
    return out, (top + torch.log(total))[..., 0]


def merge(out, lse, new_out, new_lse):
    top = torch.maximum(lse, new_lse)
    top = torch.where(top == -math.inf, 0.0, top)
    a, b = torch.exp(lse - top), torch.exp(new_lse - top)
    total = a + b
    safe = torch.where(total == 0, 1.0, total)
    return (out * (a / safe)[..., None]) + new_out * (b / safe)[..., None], top + torch.log(total)


def parts_of(places):
    cuts, step = [0], min((b - a for a, b in zip(places.tolist(), places.tolist()[1:])), default=1)
    for i in range(1, len(places)):
        if places[i] - places[i - 1] != step:
            cuts.append(i)
    return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], len(places)]) if b > a]


def pairs(mine, here, causal):
    return [(r, c) for r in parts_of(mine) for c in parts_of(here) if not causal or mine[r].max() >= here[c].min()]


def ring_forward(ring, q, k, v, positions, causal=True, scale=None):
    mine = positions[ring.rank]
    out, lse = torch.zeros_like(wide(q)), torch.full(q.shape[:-1], -math.inf, dtype=wide(q).dtype)
    for step in range(ring.world_size):
        here, works = positions[ring.origin(step)], []
        if step + 1 < ring.world_size:
            works = [ring.post(x, length=len(positions[ring.origin(step + 1)])) for x in (k, v)]
        for r, c in pairs(mine, here, causal):
            found = attend_block(q[:, :, r], k[:, :, c], v[:, :, c], mine[r], here[c], causal, scale)
            out[:, :, r], lse[:, :, r] = merge(out[:, :, r], lse[:, :, r], *found)
        if works:
            k, v = (work.wait()[0] for work in works)
    return out.to(q.dtype), lse


def ring_backward(ring, dout, q, k, v, out, lse, positions, causal=True, scale=None):
    s = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    mine, group = positions[ring.rank], q.shape[1] // k.shape[1]
    delta = (wide(dout) * wide(out)).sum(-1, keepdim=True)
    final = torch.where(lse == -math.inf, math.inf, lse)[..., None]
    dq, on_the_way = torch.zeros_like(wide(q)), []
    for step in range(ring.world_size):
        here, works = positions[ring.origin(step)], []
        due = len(positions[ring.origin(step + 1)])
        if step + 1 < ring.world_size:
            works = [ring.post(x, length=due) for x in (k, v)]
        sums = [torch.zeros_like(wide(x)) for x in (k, v)]
        for r, c in pairs(mine, here, causal):
            weights = torch.exp(raw(q[:, :, r], k[:, :, c], mine[r], here[c], causal, scale) - final[:, :, r])
            inner = wide(dout)[:, :, r] @ wide(v)[:, :, c].repeat_interleave(group, 1).mT
            inner = s * weights * (inner - delta[:, :, r])
            dq[:, :, r] += inner @ wide(k)[:, :, c].repeat_interleave(group, 1)
            for total, part in zip(sums, (inner.mT @ wide(q)[:, :, r], weights.mT @ wide(dout)[:, :, r])):
                total[:, :, c] += part.reshape(part.shape[0], -1, group, *part.shape[2:]).sum(2)
        for total, work in zip(sums, on_the_way):
            total += work.wait()[0]
        on_the_way = [ring.post(x, length=due) for x in sums] if ring.world_size > 1 else []
        if works:
            k, v = (work.wait()[0] for work in works)
    if on_the_way:
        sums = [work.wait()[0] for work in on_the_way]
    return dq.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype)
