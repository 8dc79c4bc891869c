
from ringlab.conformance import tolerance
from ringlab.merge import Partial, merge


def relative_error(x, truth):
    inf = torch.tensor(float("inf"), dtype=torch.float64)
    if x.shape != truth.shape:
        return inf
    x = x.double()
    equal = x == truth
    difference = torch.where(equal, torch.zeros_like(x), x - truth)
    scale = torch.linalg.vector_norm(torch.nan_to_num(truth, posinf=0.0, neginf=0.0))
    error = torch.linalg.vector_norm(difference) / torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.where(torch.isfinite(error), error, inf)


def fold(out, lse, outs, lses):
    state = Partial(out, lse)
    for part in zip(outs, lses):
        state = merge(state, Partial(*part))
    return state.out, state.lse


def accept(out, q, k, v):
    q, k, v = (x[None, None] for x in (q, k, v))
    true = tolerance.truth(q, k, v, torch.ones_like(q))
    allowed = tolerance.bounds(q, k, v, torch.ones_like(q), true=true)["out"]
    return tolerance.relative_error(out[None, None], true.out) <= allowed


def diagnose(ranks, errors):
    plain, large, sloped = errors["plain"], errors["large"], errors["sloped"]
    starts_sound = plain[0] < 2e-3
    if errors["repeat"].any():
        return "arrival order"
    if large.max() == float("inf") or sloped.max() == float("inf"):
        return "fp16 overflow"
    if starts_sound and large[1] > 0.05:
        return "no rescale"
    if starts_sound and plain[-1] > 8.5e-3:
        return "bf16 lse"
    if starts_sound and plain[-1] > 3e-3:
        return "bf16 out"
    if starts_sound:
        return "sound"
    return "bf16 accumulator" if plain[0] > 1.5 * plain[-1] else "bf16 q"
