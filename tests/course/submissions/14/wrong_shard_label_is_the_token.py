# expects: check=14.shard:labels misconception=label_is_the_token




def shard_batch(tokens, counts, own):
    labels = tokens.masked_fill(~counts, -100)
    return tokens[:, own], labels[:, own], own
