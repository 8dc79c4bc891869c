

def merge(outs, lses):
    state = torch.zeros(outs.shape[1:]), torch.full(lses.shape[1:], float("-inf"), dtype=lses.dtype)
    for out, lse in zip(outs, lses):
        state = merge_two(*state, out, lse)
    return state


def merge_two(out_a, lse_a, out_b, lse_b):
    dtype = torch.promote_types(out_a.dtype, lse_a.dtype)
    out_a, out_b = out_a.to(dtype), out_b.to(dtype)
    lse = torch.logaddexp(lse_a, lse_b)
    weight_b = torch.exp(lse_b - lse).masked_fill(torch.isneginf(lse_b), 0.0)
    return torch.lerp(out_a, out_b, weight_b.unsqueeze(-1).to(dtype)), lse


def update(maximum, total, acc, scores, values):
    new = torch.maximum(maximum, torch.amax(scores, -1))
    seen = new > float("-inf")
    factor = torch.exp(torch.where(seen, maximum - new, 0.0))
    powers = torch.exp(torch.where(seen[:, None], scores - new[:, None], float("-inf")))
    acc = torch.einsum("l,ld->ld", factor, acc) + torch.einsum("lk,kd->ld", powers, values)
    return new, factor * total + powers.sum(-1), acc


def streaming_attention(q, k, v, block):
    q = q.float() * q.shape[-1] ** -0.5
    out, lse = torch.zeros_like(q), torch.full(q.shape[:1], float("-inf"))
    for keys, values in zip(k.split(block), v.split(block)):
        scores = q @ keys.float().T
        out, lse = merge_two(out, lse, torch.softmax(scores, -1) @ values.float(), torch.logsumexp(scores, -1))
    return out, lse
