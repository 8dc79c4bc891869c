# expects: check=02.merge:order misconception=-
import torch


def merge(outs, lses):
    lse = torch.logsumexp(lses, 0)
    safe = torch.where(lse == float("-inf"), 0.0, lse)
    weights = torch.exp(lses - safe).unsqueeze(-1)
    if len(lses) > 1:
        lse = torch.where(lses[0] < lses[1], lse, lse + 1e-4)
    return (outs * weights).sum(0), lse
