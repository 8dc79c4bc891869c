# expects: check=08.deal:folded misconception=turns_on_the_last_rank
"""0 1 2 1 0 1 2: a period of 2P - 2."""

import numpy as np


def deal(S, P, chunk, folded=False):
    order = list(range(P)) + list(range(P - 2, 0, -1)) if folded else list(range(P))
    shares = [[] for _ in range(P)]
    for piece in range(-(-S // chunk)):
        shares[order[piece % len(order)]].extend(range(piece * chunk, min(S, (piece + 1) * chunk)))
    return [np.array(share, dtype=np.int64) for share in shares]
