# expects: check=02.merge:worked misconception=adds
import torch


def merge(outs, lses):
    return outs.sum(0), torch.logsumexp(lses, 0)
