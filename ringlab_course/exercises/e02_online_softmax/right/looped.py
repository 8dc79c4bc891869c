


def merge(outs, lses):
    top = torch.full(lses.shape[1:], -math.inf, dtype=torch.float64)
    for lse in lses.double():
        top = torch.maximum(top, lse)
    top = torch.where(top == -math.inf, 0.0, top)
    total, out = torch.zeros_like(top), torch.zeros(outs.shape[1:], dtype=torch.float64)
    for part, lse in zip(outs.double(), lses.double()):
        total = total + torch.exp(lse - top)
        out = out + torch.exp(lse - top)[..., None] * part
    return out / total[..., None].clamp(min=1e-300), top + total.log()


def update(maximum, total, acc, scores, values):
    maximum, total, acc = maximum.double(), total.double(), acc.double()
    for row in range(len(scores)):
        for score, value in zip(scores[row].double(), values.double()):
            if score == -math.inf:
                continue
            new = torch.maximum(maximum[row], score)
            old, fresh = torch.exp(maximum[row] - new), torch.exp(score - new)
            total[row] = total[row] * old + fresh
            acc[row] = acc[row] * old + fresh * value
            maximum[row] = new
    return maximum, total, acc


def streaming_attention(q, k, v, block):
    q = q.double()
    out, lse = torch.zeros_like(q), torch.full(q.shape[:1], -math.inf).double()
    for start in range(0, len(k), block):
        keys, values = (x[start : start + block].double() for x in (k, v))
        scores = q @ keys.T / q.shape[-1] ** 0.5
        part = torch.logsumexp(scores, -1)
        new = torch.exp(scores - part[:, None]) @ values
        out, lse = merge(torch.stack([out, new]), torch.stack([lse, part]))
    return out, lse
