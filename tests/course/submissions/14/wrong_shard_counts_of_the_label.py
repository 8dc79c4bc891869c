# expects: check=14.shard:counts misconception=counts_of_the_label

import torch


def shard_batch(tokens, counts, own):
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    labels[:, :-1] = labels[:, :-1].masked_fill(~counts[:, 1:], -100)
    return tokens[:, own], labels[:, own], own
