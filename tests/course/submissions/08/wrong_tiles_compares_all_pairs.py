# expects: check=08.tiles:memory misconception=compares_all_pairs
"""The whole mask, cut into tiles."""


def tile_counts(queries, keys, tile):
    mask = queries[:, None] >= keys
    full = masked = skipped = 0
    for i in range(0, len(queries), tile[0]):
        for j in range(0, len(keys), tile[1]):
            part = mask[i : i + tile[0], j : j + tile[1]]
            full += int(part.all())
            skipped += int(not part.any())
            masked += int(part.any() and not part.all())
    return full, masked, skipped
