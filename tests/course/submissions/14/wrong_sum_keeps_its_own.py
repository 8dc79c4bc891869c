# expects: check=14.sum:values misconception=keeps_its_own

import torch


def sum_gradients(ring, weights, gradients):
    return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradients, strict=True)]
