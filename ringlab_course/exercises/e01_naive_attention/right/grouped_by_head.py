

def softmax(scores):
    top = scores.max(-1, keepdims=True)
    top = np.where(np.isinf(top), np.float32(0), top)
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return powers / np.maximum(total, np.finfo(total.dtype).tiny), lse


def attention(q, k, v, mask=None, cap=None):
    scores = q @ k.swapaxes(-1, -2) / np.float32(q.shape[-1] ** 0.5)
    if cap is not None:
        scores = np.float32(cap) * np.tanh(scores / np.float32(cap))
    if mask is not None:
        scores = np.where(mask, scores, np.float32(-np.inf))
    weights, lse = softmax(scores)
    return weights @ v, lse


def causal_mask(query_positions, key_positions, window=None):
    mask = key_positions[None, :] <= query_positions[:, None]
    if window is not None:
        mask &= key_positions[None, :] > query_positions[:, None] - window
    return mask


def grouped_attention(q, k, v, mask=None):
    group, out, lse = q.shape[1] // k.shape[1], [], []
    for head in range(k.shape[1]):
        one = slice(head, head + 1)
        part = attention(q[:, head * group : (head + 1) * group], k[:, one], v[:, one], mask)
        out.append(part[0])
        lse.append(part[1])
    return np.concatenate(out, axis=1), np.concatenate(lse, axis=1)
