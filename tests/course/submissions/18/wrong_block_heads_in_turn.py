# expects: check=18.block:grouped misconception=heads_in_turn
import math

import torch


def attend_block(q, k, v, q_positions, k_positions, causal=True, scale=None):
    """Return (out, lse) of one query block on one K/V block, in the state's dtype."""
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)
    q = q.unflatten(1, (k.shape[1], 1))  # the heads that share a K/V head, on an axis of their own
    scores = scale * (q @ k[:, :, None].mT)
    if causal:
        scores = scores.masked_fill(k_positions > q_positions[:, None], -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    known = lse.masked_fill(lse == -math.inf, 0.0)  # rows without keys: exp(−inf − 0) is 0, not NaN
    out = torch.exp(scores - known[..., None]) @ v[:, :, None]
    return out.flatten(1, 2), lse.flatten(1, 2)
