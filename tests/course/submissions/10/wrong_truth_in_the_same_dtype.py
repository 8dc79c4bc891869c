# expects: check=10.accept:scores misconception=truth_in_the_same_dtype
import math

import torch

from ringlab import oracle


def truth_of(q, k, v):
    return torch.from_numpy(oracle.attention(q[None, None], k[None, None], v[None, None]).out[0, 0])


def naive(q, k, v):
    return torch.softmax(q @ k.T * q.shape[-1] ** -0.5, dim=-1) @ v


def error(x, truth):
    value = ((x.double() - truth).norm() / truth.norm()).item()
    return value if math.isfinite(value) else math.inf


def accept(out, q, k, v):
    return error(out, naive(q, k, v).double()) <= 2 * torch.finfo(q.dtype).eps
