# expects: check=02.merge:worked misconception=no_last_axis
import torch


def merge(outs, lses):
    lse = torch.logsumexp(lses, 0)
    return (outs * torch.exp(lses - lse)).sum(0), lse
