# expects: check=02.merge:large misconception=exp_of_lse
import torch


def merge(outs, lses):
    sums = torch.exp(lses)
    total = sums.sum(0)
    return (outs * sums[..., None]).sum(0) / total[..., None], torch.log(total)
