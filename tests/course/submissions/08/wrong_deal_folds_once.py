# expects: check=08.deal:folded misconception=folds_once
"""One turn forward, all others backward."""

import numpy as np


def deal(S, P, chunk, folded=False):
    shares = [[] for _ in range(P)]
    for piece in range(-(-S // chunk)):
        turn, place = divmod(piece, P)
        rank = P - 1 - place if folded and turn > 0 else place
        shares[rank].extend(range(piece * chunk, min(S, (piece + 1) * chunk)))
    return [np.array(share, dtype=np.int64) for share in shares]
