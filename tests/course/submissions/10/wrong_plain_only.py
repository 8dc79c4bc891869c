# expects: check=10.diagnose:other misconception=plain_only
import numpy as np


def diagnose(ranks, errors):
    plain = errors["plain"]
    if errors["repeat"].max() > 0:
        return "arrival order"
    if plain.max() > 0.05:
        return "no rescale"
    growth = plain[-1] / plain[0]
    if growth < 0.7:
        return "bf16 accumulator"
    if growth > 1.5:
        return "bf16 lse" if plain[-1] > 9e-3 else "bf16 out"
    return "bf16 q" if plain[0] > 2e-3 else "sound"
