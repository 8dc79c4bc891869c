from functools import reduce

from torch import inf


def merge(outs, lses):
    """The weights of the parts are the softmax of their lse."""
    weights = torch.softmax(lses, dim=0).nan_to_num(nan=0.0)
    out = torch.einsum("n...,n...d->...d", weights, outs.to(weights.dtype)) if len(outs) else torch.zeros(outs.shape[1:])
    return out, lses.logsumexp(0)


def update(maximum, total, acc, scores, values):
    """The block becomes a state of its own; two states are added."""
    top = scores.max(dim=1).values
    powers = (scores - top[:, None]).exp().nan_to_num(0.0)
    states = [(maximum, total, acc), (top, powers.sum(1), powers.mm(values))]
    new = torch.stack([maximum, top]).max(0).values
    factors = [torch.exp(m - new).nan_to_num(0.0) for m, _, _ in states]
    return (
        new,
        sum(f * t for f, (_, t, _) in zip(factors, states)),
        sum(f.view(-1, 1) * a for f, (_, _, a) in zip(factors, states)),
    )


def streaming_attention(q, k, v, block):
    def parts():
        for start in range(0, k.size(0), block):
            yield k.narrow(0, start, min(block, k.size(0) - start)), v.narrow(0, start, min(block, k.size(0) - start))

    def step(state, part):
        keys, values = (x.to(torch.float32) for x in part)
        return update(*state, queries @ keys.t(), values)

    queries = q.to(torch.float32).mul(q.size(1) ** -0.5)
    nothing = q.new_full((len(q),), -inf, dtype=torch.float32), torch.zeros(len(q)), torch.zeros(q.shape)
    m, total, acc = reduce(step, parts(), nothing)
    return acc.div(total.unsqueeze(1)), total.log().add(m)
