# expects: check=14.shard:labels misconception=shifts_after_the_cut

import torch


def shard_batch(tokens, counts, own):
    cut = tokens[:, own]
    labels = torch.full_like(cut, -100)
    labels[:, :-1] = cut[:, 1:]
    return cut, labels.masked_fill(~counts[:, own], -100), own
