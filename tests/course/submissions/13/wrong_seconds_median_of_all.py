# expects: check=13.seconds:ranks misconception=median_of_all

import numpy as np


def seconds(times_s, warmup):
    counted = times_s[warmup:]
    return np.median(counted)
