


def _tiles(length, tile):
    return [(start, min(start + tile, length)) for start in range(0, length, tile)]


def _scores(q, k, rows, keys, causal, scale):
    scores = torch.einsum("id,jd->ij", q[rows[0] : rows[1]], k[keys[0] : keys[1]].to(q.dtype)) * scale
    start = len(k) - len(q)
    if causal and keys[1] > rows[0] + start:
        hidden = torch.arange(*keys)[None, :] > torch.arange(*rows)[:, None] + start
        scores[hidden] = -math.inf
    return scores


def _one_head(q, k, v, causal, scale, tile):
    out, lse = torch.zeros_like(q), torch.zeros_like(q[:, 0])
    for rows in _tiles(len(q), tile):
        state = None
        for keys in _tiles(len(k), tile):
            if causal and keys[0] >= rows[1] + len(k) - len(q):
                continue
            scores = _scores(q, k, rows, keys, causal, scale)
            new = torch.logsumexp(scores, 1)
            part = torch.softmax(scores, 1).nan_to_num(0) @ v[keys[0] : keys[1]].to(q.dtype)
            if state is None:
                state = part, new
                continue
            share = torch.sigmoid(new - state[1])[:, None]  # the first tile is seen by all: its lse is finite
            state = state[0] - share * (state[0] - part), torch.logaddexp(state[1], new)
        out[rows[0] : rows[1]], lse[rows[0] : rows[1]] = state
    return out, lse


def tiled_forward(q, k, v, *, causal, scale, tile):
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = torch.empty(q.shape, dtype=dtype), torch.empty(q.shape[:3], dtype=dtype)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            head = q[b, h].to(dtype), k[b, h // group], v[b, h // group]
            out[b, h], lse[b, h] = _one_head(*head, causal, scale, tile)
    return out, lse


def tiled_backward(dout, q, k, v, out, lse, *, causal, scale, tile):
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            of_rows, shared = [x[b, h].to(dtype) for x in (dout, q, out, lse)], (b, h // group)
            grads = dq[b, h], dk[shared], dv[shared]
            _one_head_back(*of_rows, k[shared], v[shared], grads, causal, scale, tile)
    return dq, dk, dv


def _one_head_back(dout, q, out, lse, k, v, grads, causal, scale, tile):
    dq, dk, dv = grads
    for c, d in _tiles(len(k), tile):
        for a, b in _tiles(len(q), tile):
            if causal and c >= b + len(k) - len(q):
                continue
            delta = (dout[a:b] * out[a:b]).sum(1)
            p = (_scores(q, k, (a, b), (c, d), causal, scale) - lse[a:b, None]).exp()
            ds = p * (dout[a:b] @ v[c:d].to(q.dtype).T - delta[:, None]) * scale
            dv[c:d] += p.T @ dout[a:b]
            dk[c:d] += ds.T @ q[a:b]
            dq[a:b] += ds @ k[c:d].to(q.dtype)
