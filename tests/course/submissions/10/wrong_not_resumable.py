# expects: check=10.fold:resumable misconception=not_resumable
import math

import torch


def fold(out, lse, outs, lses):
    every = torch.cat([lse[None], lses])
    total = torch.logsumexp(every, 0)
    weights = torch.exp(every - torch.where(total == -math.inf, 0.0, total))
    return (torch.cat([out[None], outs.float()]) * weights[..., None]).sum(0), total
