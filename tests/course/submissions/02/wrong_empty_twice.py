# expects: check=02.merge:empty misconception=empty_twice
import torch


def merge(outs, lses):
    return (outs * torch.softmax(lses, 0)[..., None]).sum(0), torch.logsumexp(lses, 0)
