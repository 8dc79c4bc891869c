# expects: check=02.merge:empty misconception=sigmoid_form
import torch


def two(out_a, lse_a, out_b, lse_b):
    out = out_a - torch.sigmoid(lse_b - lse_a)[..., None] * (out_a - out_b)
    return out, lse_a - torch.nn.functional.logsigmoid(lse_a - lse_b)


def merge(outs, lses):
    state = outs[0], lses[0]
    for part in zip(outs[1:], lses[1:]):
        state = two(*state, *part)
    return state
