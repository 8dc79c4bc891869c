import platform
from importlib.metadata import version

import numpy as np


def environment():
    major, minor = platform.python_version_tuple()[:2]
    return {"torch": version("torch"), "python": [int(major), int(minor)], "machine": platform.machine()}


def split_heads(x, heads):
    return np.stack(np.split(x, heads, axis=-1), axis=1)


def ring_sum(ring, x):
    seen = [x]
    while len(seen) < ring.world_size:
        seen.append(ring.post(seen[-1]).wait()[0])
    return sum(seen)
