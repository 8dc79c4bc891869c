# expects: check=08.balance:tiles misconception=token_granularity
"""Visible pairs, whatever the tile."""


def imbalance(positions, tile):
    P, S = len(positions), sum(len(mine) for mine in positions)
    waited = 0
    for step in range(P):
        waited += max(sum(int((positions[(r - step) % P] <= q).sum()) for q in positions[r]) for r in range(P))
    return waited / (S * (S + 1) / 2 / P)
