# expects: check=13.seconds:warmup misconception=counts_warm_up

import numpy as np


def seconds(times_s, warmup):
    counted = times_s
    return np.median(counted.max(axis=1))
