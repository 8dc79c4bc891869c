# expects: check=18.merge:values misconception=adds
import math

import torch


def merge(out, lse, new_out, new_lse):
    """Return the partial result over the keys of both."""
    total = torch.logaddexp(lse, new_lse)
    known = total.masked_fill(total == -math.inf, 0.0)
    shares = (torch.exp(part - known)[..., None] for part in (lse, new_lse))
    return out + new_out, total
