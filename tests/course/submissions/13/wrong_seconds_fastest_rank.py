# expects: check=13.seconds:ranks misconception=fastest_rank

import numpy as np


def seconds(times_s, warmup):
    counted = times_s[warmup:]
    return np.median(counted.min(axis=1))
