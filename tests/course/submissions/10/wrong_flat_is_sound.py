# expects: check=10.diagnose:blocks misconception=bf16_q_called_sound
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
        return "bf16 lse" if plain[-1] > 9e-3 else "bf16 out"
    return "sound"
