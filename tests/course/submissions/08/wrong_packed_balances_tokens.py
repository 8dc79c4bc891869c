# expects: check=08.packed:small misconception=balances_tokens
"""One stretch of equally many tokens for each."""

import numpy as np


def pack(lengths, P):
    return np.array_split(np.arange(sum(lengths)), P)
