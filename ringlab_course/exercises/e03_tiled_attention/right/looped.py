import math

import torch


def _tiles(S, tile):
    return [(start, min(start + tile, S)) for start in range(0, S, tile)]


def _scores(q, k, rows, keys, causal, scale):
    scores = torch.einsum("id,jd->ij", q[rows[0] : rows[1]], k[keys[0] : keys[1]]) * scale
    if causal and keys[1] > rows[0]:
        hidden = torch.arange(*keys)[None, :] > torch.arange(*rows)[:, None]
        scores[hidden] = -math.inf
    return scores


def _one_head(q, k, v, causal, scale, tile):
    out, lse = torch.zeros_like(q), torch.zeros_like(q[:, 0])
    for rows in _tiles(len(q), tile):
        state = None
        for keys in _tiles(len(q), tile):
            if causal and keys[0] >= rows[1]:
                continue
            scores = _scores(q, k, rows, keys, causal, scale)
            new = torch.logsumexp(scores, 1)
            part = torch.softmax(scores, 1) @ v[keys[0] : keys[1]]
            if state is None:
                state = part, new
                continue
            share = torch.sigmoid(new - state[1])[:, None]  # the diagonal comes last: both are finite
            state = state[0] - share * (state[0] - part), torch.logaddexp(state[1], new)
        out[rows[0] : rows[1]], lse[rows[0] : rows[1]] = state
    return out, lse


def tiled_forward(q, k, v, *, causal, scale, tile):
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = torch.empty(q.shape, dtype=dtype), torch.empty(q.shape[:3], dtype=dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            head = (x[b, h].to(dtype) for x in (q, k, v))
            out[b, h], lse[b, h] = _one_head(*head, causal, scale, tile)
    return out, lse


def tiled_backward(dout, q, k, v, out, lse, *, causal, scale, tile):
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    dq, dk, dv = (torch.zeros(q.shape, dtype=dtype) for _ in range(3))
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            head = [x[b, h].to(dtype) for x in (dout, q, k, v, out)]
            _one_head_back(*head, lse[b, h], (dq[b, h], dk[b, h], dv[b, h]), causal, scale, tile)
    return dq, dk, dv


def _one_head_back(dout, q, k, v, out, lse, grads, causal, scale, tile):
    dq, dk, dv = grads
    for c, d in _tiles(len(q), tile):
        for a, b in _tiles(len(q), tile):
            if causal and c >= b:
                continue
            delta = (dout[a:b] * out[a:b]).sum(1)
            p = (_scores(q, k, (a, b), (c, d), causal, scale) - lse[a:b, None]).exp()
            ds = p * (dout[a:b] @ v[c:d].T - delta[:, None]) * scale
            dv[c:d] += p.T @ dout[a:b]
            dk[c:d] += ds.T @ q[a:b]
            dq[a:b] += ds @ k[c:d]
