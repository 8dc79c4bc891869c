# expects: check=13.seconds:warmup misconception=drops_the_slowest

import numpy as np


def seconds(times_s, warmup):
    rounds = sorted(times_s.max(axis=1))
    return np.median(rounds[: len(rounds) - warmup])
