# expects: check=13.seconds:warmup misconception=drops_the_last

import numpy as np


def seconds(times_s, warmup):
    counted = times_s[: len(times_s) - warmup]
    return np.median(counted.max(axis=1))
