

def softmax(scores):
    top = np.nan_to_num(scores.max(-1, keepdims=True), neginf=0)
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    lse = np.full_like(total, -np.inf)
    np.log(total, out=lse, where=total > 0)
    return np.divide(powers, total, out=np.zeros_like(powers), where=total > 0), (lse + top)[..., 0]


def causal_mask(query_positions, key_positions, window=None):
    mask = np.greater_equal.outer(query_positions, key_positions)
    return mask if window is None else mask & np.less.outer(query_positions, key_positions + window)


def attention(q, k, v, mask=None, cap=None):
    scores = np.einsum("bhqd,bhkd->bhqk", q * np.float32(q.shape[-1] ** -0.5), k)
    if cap:
        scores = np.tanh(scores * np.float32(1 / cap)) * np.float32(cap)
    if mask is not None:
        scores = scores + np.where(mask, 0, -np.inf)
    weights, lse = softmax(scores)
    return np.einsum("bhqk,bhkd->bhqd", weights, v), lse


def grouped_attention(q, k, v, mask=None):
    B, H, L, D = q.shape
    K = k.shape[1]
    split = q.reshape(B, K, H // K, L, D) * np.float32(D**-0.5)
    scores = np.einsum("bkgqd,bknd->bkgqn", split, k)
    if mask is not None:
        scores = np.where(mask, scores, np.float32(-np.inf))
    weights, lse = softmax(scores)
    return np.einsum("bkgqn,bknd->bkgqd", weights, v).reshape(q.shape), lse.reshape(q.shape[:-1])
