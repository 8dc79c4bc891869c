# expects: check=18.merge:far misconception=exp_of_lse
import math

import torch


def merge(out, lse, new_out, new_lse):
    """Return the partial result over the keys of both."""
    total = torch.log(torch.exp(lse) + torch.exp(new_lse))
    known = total.masked_fill(total == -math.inf, 0.0)
    shares = (torch.exp(part - known)[..., None] for part in (lse, new_lse))
    return next(shares) * out + next(shares) * new_out, total
