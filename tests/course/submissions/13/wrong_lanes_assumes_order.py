# expects: check=13.lanes:lanes misconception=assumes_order

import numpy as np


def covered(spans):
    total, reached = 0.0, -np.inf
    for start, length in spans.tolist():
        total += max(0.0, start + length - max(start, reached))
        reached = max(reached, start + length)
    return total / 1e6


def lanes(events, rank):
    own = events[events[:, 0] == rank]
    computing, copying = (covered(own[own[:, 1] == lane, 2:]) for lane in (0, 1))
    exposed = covered(own[:, 2:]) - computing
    return computing, copying, exposed, 1 - exposed / copying if copying else 1.0
