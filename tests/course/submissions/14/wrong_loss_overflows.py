# expects: check=14.loss:large misconception=overflows

import torch


def loss_share(ring, logits, labels):
    counted = labels != -100
    count = ring.all_reduce(counted.sum())
    powers = logits.float().exp()
    chances = (powers / powers.sum(-1, keepdim=True))[counted]
    return -chances[torch.arange(len(chances)), labels[counted]].log().sum() / count
