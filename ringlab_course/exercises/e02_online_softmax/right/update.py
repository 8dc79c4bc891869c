


def merge(outs, lses):
    lse = torch.logsumexp(lses, 0)
    safe = torch.where(lse == -math.inf, 0.0, lse)
    return torch.einsum("p...d,p...->...d", outs.to(lses.dtype), torch.exp(lses - safe)), lse


def update(maximum, total, acc, scores, values):
    new = torch.maximum(maximum, scores.max(dim=-1).values)
    anchor = torch.where(torch.isneginf(new), 0.0, new)
    factor = torch.exp(maximum - anchor)
    powers = torch.exp(scores - anchor[:, None])
    return new, total * factor + powers.sum(-1), acc * factor[:, None] + powers @ values


def streaming_attention(q, k, v, block):
    L, D = q.shape
    state = torch.full((L,), -math.inf), torch.zeros(L), torch.zeros(L, D)
    for start in range(0, len(k), block):
        keys, values = k[start : start + block].float(), v[start : start + block].float()
        state = update(*state, q.float() @ keys.T / math.sqrt(D), values)
    maximum, total, acc = state
    return acc / total[:, None], maximum + torch.log(total)
