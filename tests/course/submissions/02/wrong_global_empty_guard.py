# expects: check=02.merge:many misconception=-
import torch


def merge(outs, lses):
    lse = torch.logsumexp(lses, 0)
    if torch.isneginf(lse).all():
        return torch.zeros(outs.shape[1:]), lse
    safe = torch.where(lse == float("-inf"), 0.0, lse)
    weights = torch.exp(lses - safe).unsqueeze(-1)
    out = (outs * weights).sum(0)
    return torch.where(lse.unsqueeze(-1) < -30, torch.zeros_like(out), out), lse
