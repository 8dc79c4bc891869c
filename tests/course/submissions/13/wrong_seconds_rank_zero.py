# expects: check=13.seconds:ranks misconception=rank_zero

import numpy as np


def seconds(times_s, warmup):
    counted = times_s[warmup:]
    return np.median(counted[:, 0])
