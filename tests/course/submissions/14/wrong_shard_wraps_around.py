# expects: check=14.shard:labels misconception=wraps_around

import torch


def shard_batch(tokens, counts, own):
    labels = torch.roll(tokens, -1, dims=1).masked_fill(~counts, -100)
    return tokens[:, own], labels[:, own], own
