from numpy import einsum, inf


def softmax(scores):
    """First the lse, with logaddexp; then the weights are what is left of each score."""
    lse = np.logaddexp.reduce(scores, axis=-1, initial=-inf)
    with np.errstate(invalid="ignore"):
        weights = np.nan_to_num(np.exp(scores - np.expand_dims(lse, -1)), nan=0.0)
    return weights, lse


def causal_mask(query_positions, key_positions, window=None):
    seen = np.greater_equal.outer(query_positions, key_positions)
    if window:
        seen &= ~np.greater_equal.outer(query_positions - window, key_positions)
    return seen


def attention(q, k, v, mask=None, cap=None):
    scores = einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
    if cap:
        scores = np.tanh(scores / cap, out=scores)
        scores *= cap
    if mask is not None:
        scores[~np.broadcast_to(mask, scores.shape)] = -inf
    weights, lse = softmax(scores)
    return einsum("bhij,bhjd->bhid", weights, v), lse


def grouped_attention(q, k, v, mask=None):
    outs, lses = [], []
    for n, queries in enumerate(np.split(q, k.shape[1], axis=1)):
        wide = (*queries.shape[:2], *k.shape[2:])
        out, lse = attention(queries, np.broadcast_to(k[:, [n]], wide), np.broadcast_to(v[:, [n]], wide), mask)
        outs.append(out)
        lses.append(lse)
    return np.concatenate(outs, axis=1), np.hstack(lses)
