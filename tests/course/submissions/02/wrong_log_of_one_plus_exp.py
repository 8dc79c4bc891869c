# expects: check=02.merge:large misconception=log_of_one_plus_exp
import torch


def two(out_a, lse_a, out_b, lse_b):
    lse = lse_a + torch.log(1 + torch.exp(lse_b - lse_a))
    return out_a * torch.exp(lse_a - lse)[..., None] + out_b * torch.exp(lse_b - lse)[..., None], lse


def merge(outs, lses):
    state = outs[0], lses[0]
    for part in zip(outs[1:], lses[1:]):
        state = two(*state, *part)
    return state
