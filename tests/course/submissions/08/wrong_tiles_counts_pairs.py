# expects: check=08.tiles:ascending misconception=counts_pairs
"""Pairs of tokens."""


def tile_counts(queries, keys, tile):
    visible = sum(int((keys <= q).sum()) for q in queries)
    return visible, 0, len(queries) * len(keys) - visible
