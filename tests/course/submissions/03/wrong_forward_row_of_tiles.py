# expects: check=03.forward:live-set misconception=row_of_tiles
import math

import torch


def tiled_forward(q, k, v, *, causal, scale, tile):
    S, dtype = q.shape[-2], torch.promote_types(q.dtype, torch.float32)
    out, lse = [], []
    for row in range(0, S, tile):
        end = min(row + tile, S)
        seen = end if causal else S
        scores = scale * (q[..., row:end, :].to(dtype) @ k[..., :seen, :].to(dtype).mT)
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + row), -math.inf)
        out.append(torch.softmax(scores, dim=-1) @ v[..., :seen, :].to(dtype))
        lse.append(scores.logsumexp(-1))
    return torch.cat(out, dim=-2), torch.cat(lse, dim=-1)
