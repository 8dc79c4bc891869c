# expects: check=18.forward:tiles misconception=cleans_hidden_tiles
import math

import torch


def attend_block(q, k, v, q_positions, k_positions, causal=True, scale=None):
    """Return (out, lse) of one query block on one K/V block, in the state's dtype."""
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    q = q.unflatten(1, (k.shape[1], group))  # the heads that share a K/V head, on an axis of their own
    scores = scale * (q @ k[:, :, None].mT)
    if causal:
        scores = scores.masked_fill(k_positions > q_positions[:, None], -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    known = lse.masked_fill(lse == -math.inf, 0.0)  # rows without keys: exp(−inf − 0) is 0, not NaN
    out = torch.exp(scores - known[..., None]) @ v[:, :, None]
    return out.flatten(1, 2), lse.flatten(1, 2)


def merge(out, lse, new_out, new_lse):
    """Return the partial result over the keys of both."""
    total = torch.logaddexp(lse, new_lse)
    known = total.masked_fill(total == -math.inf, 0.0)
    shares = (torch.exp(part - known)[..., None] for part in (lse, new_lse))
    return next(shares) * out + next(shares) * new_out, total


def ring_forward(ring, q, k, v, positions, causal=True, scale=None):
    """Return this rank's (out, lse)."""
    def stretches(places):
        """Rows whose positions rise by the same step: such a stretch lies before, after or across another."""
        steps = places.diff()
        cuts = (torch.nonzero(steps > steps.min()).flatten() + 1).tolist() if len(steps) else []
        return [rows for rows in torch.arange(len(places)).tensor_split(cuts) if len(rows)]

    mine = positions[ring.rank]
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    lse = torch.full(q.shape[:-1], -math.inf, dtype=out.dtype)
    for step in range(ring.world_size):
        here, last = positions[ring.origin(step)], step == ring.world_size - 1
        coming = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        for rows in stretches(mine):
            seen = torch.ones_like(here, dtype=torch.bool)
            if not seen.any():
                continue
            keys, values = (x[:, :, seen].nan_to_num() for x in (k, v))
            tile = q[:, :, rows], keys, values, mine[rows], here[seen]
            merged = merge(out[:, :, rows], lse[:, :, rows], *attend_block(*tile, causal, scale))
            out[:, :, rows], lse[:, :, rows] = merged
        if coming is not None:
            k, v = coming.wait()
    return out.to(q.dtype), lse
