# expects: check=08.tiles:seams misconception=assumes_ascending
"""The first and last token of a group for its earliest and latest."""


def tile_counts(queries, keys, tile):
    full = masked = skipped = 0
    for i in range(0, len(queries), tile[0]):
        rows = queries[i : i + tile[0]]
        for j in range(0, len(keys), tile[1]):
            columns = keys[j : j + tile[1]]
            if rows[-1] < columns[0]:
                skipped += 1
            elif rows[0] >= columns[-1]:
                full += 1
            else:
                masked += 1
    return full, masked, skipped
