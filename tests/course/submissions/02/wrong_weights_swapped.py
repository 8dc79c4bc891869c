# expects: check=02.merge:worked misconception=weights_swapped
import torch


def merge(outs, lses):
    lse = torch.logsumexp(lses, 0)
    safe = torch.where(lse == float("-inf"), 0.0, lse)
    weights = torch.exp(lses - safe).unsqueeze(-1)
    return (outs * weights.flip(0)).sum(0), lse
