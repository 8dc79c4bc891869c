# expects: check=13.lanes:lanes misconception=from_first_to_last

import numpy as np


def covered(spans):
    total, reached = 0.0, -np.inf
    for start, length in sorted(spans.tolist()):
        total += max(0.0, start + length - max(start, reached))
        reached = max(reached, start + length)
    return total / 1e6


def stretch(spans):
    return (spans.sum(axis=1).max() - spans[:, 0].min()) / 1e6 if len(spans) else 0.0


def lanes(events, rank):
    own = events[events[:, 0] == rank]
    compute, copy = (own[own[:, 1] == lane, 2:] for lane in (0, 1))
    exposed = covered(own[:, 2:]) - covered(compute)
    return stretch(compute), stretch(copy), exposed, 1 - exposed / stretch(copy) if len(copy) else 1.0
