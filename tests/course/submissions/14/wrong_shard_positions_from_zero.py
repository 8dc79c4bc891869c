# expects: check=14.shard:labels misconception=positions_from_zero

import torch


def shard_batch(tokens, counts, own):
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    labels = labels.masked_fill(~counts, -100)
    return tokens[:, own], labels[:, own], torch.arange(len(own))
