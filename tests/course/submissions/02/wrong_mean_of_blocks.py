# expects: check=02.stream:small misconception=mean_of_blocks
import math

import torch


def update(maximum, total, acc, scores, values):
    new = torch.maximum(maximum, scores.max(dim=-1).values)
    anchor = torch.where(torch.isneginf(new), 0.0, new)
    factor = torch.exp(maximum - anchor)
    powers = torch.exp(scores - anchor[:, None])
    return new, total * factor + powers.sum(-1), acc * factor[:, None] + powers @ values


def streaming_attention(q, k, v, block):
    outs, lses = [], []
    for start in range(0, len(k), block):
        scores = q.float() @ k[start : start + block].float().T / math.sqrt(q.shape[-1])
        outs.append(torch.softmax(scores, -1) @ v[start : start + block].float())
        lses.append(torch.logsumexp(scores, -1))
    return torch.stack(outs).mean(0), torch.logsumexp(torch.stack(lses), 0)
