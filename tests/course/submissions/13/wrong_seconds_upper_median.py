# expects: check=13.seconds:even misconception=upper_median

import numpy as np


def seconds(times_s, warmup):
    counted = times_s[warmup:]
    return np.sort(counted.max(axis=1))[len(counted) // 2]
