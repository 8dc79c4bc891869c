import functools


def relative_error(x, truth):
    x, truth = np.asarray(x.double()), np.asarray(truth)
    if x.shape != truth.shape:
        return math.inf
    known = np.isfinite(truth)
    if not np.array_equal(x[~known], truth[~known]):
        return math.inf
    error = np.linalg.norm(x[known] - truth[known])
    if not math.isfinite(error):
        return math.inf
    return float(error / (np.linalg.norm(truth[known]) or 1.0))


def fold(out, lse, outs, lses):
    out, lse = out.double(), lse.double()
    for part_out, part_lse in zip(outs.double(), lses.double()):
        total = torch.logaddexp(lse, part_lse)
        weight = torch.exp(part_lse - total).masked_fill(part_lse == -math.inf, 0.0)
        out, lse = torch.lerp(out, part_out, weight[:, None]), total
    return out, lse


def accept(out, q, k, v):
    truth = torch.from_numpy(oracle.attention(q[None, None], k[None, None], v[None, None]).out[0, 0])
    scores = (q @ k.T) / math.sqrt(q.shape[-1])
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    plain = (weights @ v) / weights.sum(-1, keepdim=True)
    return relative_error(out, truth) <= 3 * relative_error(plain, truth) + torch.finfo(q.dtype).eps


@functools.cache
def templates(ranks):
    return {name: signature(error_curves.curves(name, ranks, seed=99, rows=16, gain=12.0)) for name in error_curves.FAULTS}


def signature(errors):
    curves = np.concatenate([np.log(np.clip(errors[name], 1e-9, 1e2)) for name in ("plain", "large", "sloped")])
    return np.append(curves, 20.0 * (np.max(errors["repeat"]) > 0))


def diagnose(ranks, errors):
    mine = signature(errors)
    distance = {name: np.abs(mine - other).mean() for name, other in templates(tuple(ranks)).items()}
    return min(distance, key=distance.get)
