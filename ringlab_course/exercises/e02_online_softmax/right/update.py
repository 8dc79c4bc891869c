import math

import torch


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
    q, k, v = q.float(), k.float(), v.float()
    L, D = q.shape
    state = torch.full((L,), -math.inf), torch.zeros(L), torch.zeros(L, D)
    for start in range(0, len(k), block):
        scores = q @ k[start : start + block].T / math.sqrt(D)
        state = update(*state, scores, v[start : start + block])
    maximum, total, acc = state
    return acc / total[:, None], maximum + torch.log(total)
