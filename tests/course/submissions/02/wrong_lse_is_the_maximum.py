# expects: check=02.merge:cut misconception=lse_is_the_maximum
import torch


def merge(outs, lses):
    return (outs * torch.softmax(lses, 0)[..., None]).sum(0), lses.max(0).values
