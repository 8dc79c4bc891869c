# expects: check=02.merge:worked misconception=averages
import torch


def merge(outs, lses):
    return outs.mean(0), torch.logsumexp(lses, 0)
