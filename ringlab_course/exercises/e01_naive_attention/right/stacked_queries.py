

def softmax(scores):
    scores = np.array(scores, dtype=np.float64)
    top = np.max(scores, axis=-1, keepdims=True, initial=np.finfo(np.float32).min)
    np.subtract(scores, top, out=scores)
    np.exp(scores, out=scores)
    sums = scores.sum(-1, keepdims=True)
    empty = sums == 0
    scores /= sums + empty
    with np.errstate(divide="ignore"):
        return scores.astype(np.float32), (np.log(sums) + top).squeeze(-1).astype(np.float32)


def causal_mask(query_positions, key_positions, window=None):
    i, j = np.meshgrid(query_positions, key_positions, indexing="ij")
    if window is None:
        return ~(j > i)
    return np.logical_and(j <= i, j > i - window)


def attention(q, k, v, mask=None, cap=None):
    bias = 0.0
    if mask is not None:
        bias = np.where(mask, 0.0, -np.inf)
    scores = np.matmul(q / np.sqrt(q.shape[-1]), np.transpose(k, (0, 1, 3, 2)))
    scores = scores if cap is None else np.tanh(scores / cap) * cap
    weights, lse = softmax(scores + bias)
    return np.matmul(weights, v), lse


def grouped_attention(q, k, v, mask=None):
    """The queries of a group are stacked under one another: more rows for the same keys."""
    B, H, L, D = q.shape
    K = k.shape[1]
    stacked = q.reshape(B, K, -1, D)
    tall = None if mask is None else np.tile(mask, (H // K, 1))
    out, lse = attention(stacked, k, v, tall)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])
