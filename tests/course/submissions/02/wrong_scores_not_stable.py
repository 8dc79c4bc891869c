# expects: check=02.stream:sharp misconception=scores_not_stable
import math

import torch


def update(maximum, total, acc, scores, values):
    new = torch.maximum(maximum, scores.max(dim=-1).values)
    anchor = torch.where(torch.isneginf(new), 0.0, new)
    factor = torch.exp(maximum - anchor)
    powers = torch.exp(scores - anchor[:, None])
    return new, total * factor + powers.sum(-1), acc * factor[:, None] + powers @ values


def streaming_attention(q, k, v, block):
    q, k, v = q.float(), k.float(), v.float()
    total, acc = torch.zeros(len(q)), torch.zeros_like(q)
    for start in range(0, len(k), block):
        powers = torch.exp(q @ k[start : start + block].T / math.sqrt(q.shape[-1]))
        total, acc = total + powers.sum(-1), acc + powers @ v[start : start + block]
    return acc / total[:, None], torch.log(total)
