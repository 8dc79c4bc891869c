# expects: check=10.diagnose:any misconception=one_point
import numpy as np


def diagnose(ranks, errors):
    last = {name: values[-1] for name, values in errors.items()}
    if not np.isfinite(last["large"]):
        return "fp16 overflow"
    if last["repeat"] > 0:
        return "arrival order"
    if last["sloped"] > 0.1:
        return "no rescale"
    if last["plain"] > 4e-3:
        return "bf16 lse" if last["plain"] > 9e-3 else "bf16 out"
    if last["plain"] < 2e-3:
        return "sound"
    return "bf16 q" if last["large"] > 2.5e-3 else "bf16 out"
