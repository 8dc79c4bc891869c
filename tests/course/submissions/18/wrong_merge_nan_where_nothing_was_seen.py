# expects: check=18.merge:empty misconception=nan_where_nothing_was_seen
import math

import torch


def merge(out, lse, new_out, new_lse):
    """Return the partial result over the keys of both."""
    total = torch.logaddexp(lse, new_lse)
    known = total
    shares = (torch.exp(part - known)[..., None] for part in (lse, new_lse))
    return next(shares) * out + next(shares) * new_out, total
