


def tiled_forward(q, k, v, *, causal, scale, tile):
    dtype = torch.promote_types(q.dtype, torch.float32)
    M, N, K = q.shape[-2], k.shape[-2], k.shape[1]
    start = N - M
    out = torch.zeros(q.shape, dtype=dtype)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=dtype)
    for row in range(0, M, tile):
        rows = slice(row, min(row + tile, M))
        q_tile = q[..., rows, :].to(dtype).unflatten(1, (K, -1))
        m = torch.full(q_tile.shape[:-1], -math.inf, dtype=dtype)
        total, acc = torch.zeros_like(m), torch.zeros_like(q_tile)
        for key in range(0, start + rows.stop if causal else N, tile):
            keys = slice(key, min(key + tile, N))
            k_tile, v_tile = (x[:, :, None, keys, :].to(dtype) for x in (k, v))
            scores = scale * (q_tile @ k_tile.mT)
            if causal and keys.stop - 1 > start + row:
                hidden = torch.arange(key, keys.stop) > torch.arange(row, rows.stop)[:, None] + start
                scores = scores.masked_fill(hidden, -math.inf)
            top = torch.maximum(m, scores.amax(-1))
            old, powers = torch.exp(m - top), torch.exp(scores - top[..., None])
            total = total * old + powers.sum(-1)
            acc = acc * old[..., None] + powers @ v_tile
            m = top
        result, state = acc / total[..., None], m + torch.log(total)
        out[..., rows, :], lse[..., rows] = result.flatten(1, 2), state.flatten(1, 2)
    return out, lse


def tiled_backward(dout, q, k, v, out, lse, *, causal, scale, tile):
    dtype = torch.promote_types(q.dtype, torch.float32)
    M, N, K = q.shape[-2], k.shape[-2], k.shape[1]
    start = N - M
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
    for row in range(0, M, tile):
        rows = slice(row, min(row + tile, M))
        q_tile, dout_tile, out_tile = (
            x[..., rows, :].to(dtype).unflatten(1, (K, -1)) for x in (q, dout, out)
        )
        total = lse[..., rows, None].unflatten(1, (K, -1))
        delta = (dout_tile * out_tile).sum(-1, keepdim=True)
        for key in range(0, start + rows.stop if causal else N, tile):
            keys = slice(key, min(key + tile, N))
            k_tile, v_tile = (x[:, :, None, keys, :].to(dtype) for x in (k, v))
            scores = scale * (q_tile @ k_tile.mT)
            if causal and keys.stop - 1 > start + row:
                hidden = torch.arange(key, keys.stop) > torch.arange(row, rows.stop)[:, None] + start
                scores = scores.masked_fill(hidden, -math.inf)
            weights = torch.exp(scores - total)
            dweights = dout_tile @ v_tile.mT
            dscores = weights * (dweights - delta)
            dq[..., rows, :] += scale * (dscores @ k_tile).flatten(1, 2)
            dk[..., keys, :] += scale * (dscores.mT @ q_tile).sum(2)
            dv[..., keys, :] += (weights.mT @ dout_tile).sum(2)
    return dq, dk, dv
