# expects: check=10.accept:not_finite misconception=blind_to_nan
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
    truth = truth_of(q, k, v)
    allowed = max(2 * error(naive(q, k, v), truth), torch.finfo(q.dtype).eps)
    off = (out.double() - truth).norm() / truth.norm()
    if off > allowed:
        return False
    return True
