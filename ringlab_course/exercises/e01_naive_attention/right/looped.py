

def softmax(scores):
    weights = np.zeros(scores.shape)
    lse = np.full(scores.shape[:-1], -np.inf)
    for row in np.ndindex(scores.shape[:-1]):
        seen = scores[row] > -np.inf
        if seen.any():
            lse[row] = np.logaddexp.reduce(scores[row][seen].astype(np.float64))
            weights[row] = np.exp(scores[row] - lse[row])
    return weights, lse


def causal_mask(query_positions, key_positions, window=np.inf):
    return np.array([[bool(0 <= query - key < window) for key in key_positions] for query in query_positions])


def attention(q, k, v, mask=None, cap=None):
    return grouped_attention(q, k, v, mask, cap)


def grouped_attention(q, k, v, mask=None, cap=None):
    B, H, Lq, D = q.shape
    seen = np.broadcast_to(True if mask is None else mask, (B, H, Lq, k.shape[2]))
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:-1])
    for b in range(B):
        for h in range(H):
            kv = h * k.shape[1] // H
            scores = q[b, h] @ k[b, kv].T / D**0.5
            scores = scores if cap is None else cap * np.tanh(scores / cap)
            scores = np.where(seen[b, h], scores, -np.inf)
            weights, lse[b, h] = softmax(scores)
            out[b, h] = weights @ v[b, kv]
    return out, lse
