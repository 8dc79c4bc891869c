# expects: check=13.seconds:ranks misconception=medians_first

import numpy as np


def seconds(times_s, warmup):
    counted = times_s[warmup:]
    return np.median(counted, axis=0).max()
