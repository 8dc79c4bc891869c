# expects: check=02.stream:memory misconception=whole_row_at_once
import math

import torch


def update(maximum, total, acc, scores, values):
    new = torch.maximum(maximum, scores.max(dim=-1).values)
    anchor = torch.where(torch.isneginf(new), 0.0, new)
    factor = torch.exp(maximum - anchor)
    powers = torch.exp(scores - anchor[:, None])
    return new, total * factor + powers.sum(-1), acc * factor[:, None] + powers @ values


def streaming_attention(q, k, v, block):
    scores = q.float() @ k.float().T / math.sqrt(q.shape[-1])
    return torch.softmax(scores, -1) @ v.float(), torch.logsumexp(scores, -1)
