# expects: check=01.attention:blind misconception=finite_number_for_hidden
import numpy as np


def softmax(scores):
    top = scores.max(-1, keepdims=True)
    top = np.where(np.isinf(top), np.float32(0), top)
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return powers / np.maximum(total, np.finfo(total.dtype).tiny), lse


def attention(q, k, v, mask=None):
    scores = q @ k.swapaxes(-1, -2) / np.float32(q.shape[-1] ** 0.5)
    if mask is not None:
        scores = np.where(mask, scores, np.float32(-1e9))
    weights, lse = softmax(scores)
    return weights @ v, lse
