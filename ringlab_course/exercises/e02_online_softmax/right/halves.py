


def merge(outs, lses):
    """Halves of halves."""
    N = outs.shape[0]
    dtype = torch.promote_types(outs.dtype, torch.float32)
    if N == 0:
        return torch.zeros(outs.shape[1:], dtype=dtype), torch.full(lses.shape[1:], -math.inf)
    if N == 1:
        return outs[0].to(dtype), lses[0]
    (a, x), (b, y) = merge(outs[: N // 2], lses[: N // 2]), merge(outs[N // 2 :], lses[N // 2 :])
    top = torch.maximum(x, y)
    top = torch.where(torch.isinf(top), torch.zeros_like(top), top)
    u, w = torch.exp(x - top), torch.exp(y - top)
    sum_ = u + w
    safe = torch.where(sum_ == 0, torch.ones_like(sum_), sum_)
    out = (u.unsqueeze(-1) * a + w.unsqueeze(-1) * b) / safe.unsqueeze(-1)
    return out, torch.where(sum_ == 0, -math.inf, top + safe.log())


def update(maximum, total, acc, scores, values):
    """In place, row by row where a row sees anything."""
    maximum, total, acc = maximum.clone(), total.clone(), acc.clone()
    best = scores.amax(1)
    rows = best > -math.inf
    up = rows & (best > maximum)
    shrink = torch.exp(maximum[up] - best[up])
    total[up] *= shrink
    acc[up] *= shrink[:, None]
    maximum[up] = best[up]
    powers = torch.exp(scores[rows] - maximum[rows, None])
    total[rows] += powers.sum(1)
    acc[rows] += powers @ values
    return [maximum, total, acc]


def streaming_attention(q, k, v, block):
    state = merge(q.new_zeros(0, *q.shape), q.new_zeros(0, len(q)))
    for i in range((len(k) + block - 1) // block):
        part = slice(i * block, (i + 1) * block)
        scores = q.float() @ k[part].float().T / math.sqrt(q.shape[1])
        new = scores.softmax(1) @ v[part].float(), scores.logsumexp(1)
        state = merge(*(torch.stack(both) for both in zip(state, new)))
    return state
