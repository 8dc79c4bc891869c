


def relative_error(x, truth):
    if tuple(x.shape) != tuple(truth.shape):
        return math.inf
    total = scale = 0.0
    for a, b in zip(x.double().flatten().tolist(), truth.flatten().tolist()):
        if math.isinf(b) and a == b:
            continue
        if math.isinf(b) or not math.isfinite(a):
            return math.inf
        total, scale = total + (a - b) ** 2, scale + b * b
    return math.sqrt(total / scale) if scale else math.sqrt(total)


def fold(out, lse, outs, lses):
    maximum, total, acc = lse, torch.isfinite(lse).float(), out
    for i in range(len(outs)):
        new = torch.maximum(lse, lses[i])
        anchor = torch.where(new == -math.inf, 0.0, new)
        old, fresh = torch.exp(lse - anchor), torch.exp(lses[i] - anchor)
        both = old + fresh
        out = (out * old[..., None] + outs[i].float() * fresh[..., None]) / both.clamp(min=1e-30)[..., None]
        lse = anchor + torch.log(both)
    return out, lse


def accept(out, q, k, v):
    truth = oracle.attention(q[None, None], k[None, None], v[None, None]).out[0, 0]
    plain = torch.softmax(q @ k.T / q.shape[-1] ** 0.5, -1) @ v
    worst = np.abs(truth).max()
    allowed = 3 * np.abs(plain.double().numpy() - truth).max() / worst
    found = np.abs(out.double().numpy() - truth).max() / worst
    return bool(found <= max(allowed, torch.finfo(q.dtype).eps))


def diagnose(ranks, errors):
    if any(value > 0 for value in errors["repeat"]):
        return "arrival order"
    values = [errors[name] for name in ("plain", "large", "sloped")]
    if any(not math.isfinite(x) for row in values for x in row):
        return "fp16 overflow"
    if max(errors["large"]) > 0.1:
        return "no rescale"
    slope = np.polyfit(np.log(ranks), np.log(errors["plain"]), 1)[0]
    if slope < -0.15:
        return "bf16 accumulator"
    if slope > 0.15:
        return "bf16 lse" if max(errors["plain"]) > 8.5e-3 else "bf16 out"
    return "bf16 q" if max(errors["large"]) > 1.7 * 1.7e-3 else "sound"
