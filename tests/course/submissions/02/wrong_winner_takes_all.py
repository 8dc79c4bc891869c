# expects: check=02.merge:worked misconception=winner_takes_all
import torch


def merge(outs, lses):
    best = lses.argmax(0, keepdim=True)
    return torch.take_along_dim(outs, best[..., None], 0)[0], lses.max(0).values
