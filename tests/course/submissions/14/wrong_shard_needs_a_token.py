# expects: check=14.shard:edges misconception=-

import torch


def shard_batch(tokens, counts, own):
    labels = torch.full_like(tokens, -100)
    last = int(own[-1])
    assert last < tokens.shape[1]
    labels[:, :-1] = tokens[:, 1:]
    labels = labels.masked_fill(~counts, -100)
    return tokens[:, own], labels[:, own], own
