# expects: check=13.seconds:ranks misconception=mean_of_ranks

import numpy as np


def seconds(times_s, warmup):
    counted = times_s[warmup:]
    return np.median(counted.mean(axis=1))
