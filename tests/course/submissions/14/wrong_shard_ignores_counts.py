# expects: check=14.shard:counts misconception=ignores_counts

import torch


def shard_batch(tokens, counts, own):
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    return tokens[:, own], labels[:, own], own
