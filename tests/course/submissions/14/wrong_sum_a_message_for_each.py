# expects: check=14.sum:messages misconception=a_message_for_each

import torch


def sum_gradients(ring, weights, gradients):
    found = []
    for w, g in zip(weights, gradients, strict=True):
        part = torch.zeros_like(w) if g is None else g
        found.append(ring.all_reduce(part.to(torch.promote_types(w.dtype, torch.float32))).to(w.dtype))
    return found
