# expects: check=08.balance:memory misconception=compares_all_pairs
"""A mask of all pairs in every step."""


def imbalance(positions, tile):
    P, S = len(positions), sum(len(mine) for mine in positions)
    waited = 0
    for step in range(P):
        busiest = 0
        for r in range(P):
            mask = positions[r][:, None] >= positions[(r - step) % P]
            tiles = 0
            for i in range(0, mask.shape[0], tile[0]):
                for j in range(0, mask.shape[1], tile[1]):
                    tiles += bool(mask[i : i + tile[0], j : j + tile[1]].any())
            busiest = max(busiest, tiles)
        waited += busiest
    return waited * tile[0] * tile[1] / (S * (S + 1) / 2 / P)
