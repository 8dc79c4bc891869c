# expects: check=10.diagnose:merges misconception=always_the_same
import numpy as np


def diagnose(ranks, errors):
    return "bf16 lse"
