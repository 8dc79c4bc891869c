# expects: check=10.diagnose:merges misconception=missed_bf16_lse
import numpy as np


def diagnose(ranks, errors):
    plain, large, sloped, repeat = (errors[n] for n in ("plain", "large", "sloped", "repeat"))
    if not np.isfinite([plain, large, sloped]).all():
        return "fp16 overflow"
    if repeat.max() > 0:
        return "arrival order"
    if sloped.max() > 0.1:
        return "no rescale"
    growth = plain[-1] / plain[0]
    if growth < 0.7:
        return "bf16 accumulator"
    if growth > 1.5:
        return "bf16 out"
    return "bf16 q" if large[0] > 2.5e-3 else "sound"
