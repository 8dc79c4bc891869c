"""Merges two partials at a time, sums shares that every rank knows, and keeps a running pair in the ring."""


def place(tokens, interleave, P):
    turn, inside = tokens // (interleave * P), tokens % (interleave * P)
    return inside // interleave, turn * interleave + inside % interleave


def merge_two(one, other):
    (a, la), (b, lb) = one, other
    lse = torch.logaddexp(la, lb)
    keep = lse.masked_fill(lse == -math.inf, 0.0)
    return a * torch.exp(la - keep)[..., None] + b * torch.exp(lb - keep)[..., None], lse


def merge_all(outs, lses):
    total = outs[0], lses[0]
    for pair in zip(outs[1:], lses[1:], strict=True):
        total = merge_two(total, pair)
    return total


def decode(ring, q, k, v):
    P, mine = ring.world_size, ring.rank
    queries = ring.all_gather(q)
    parts = [attend(_some_heads(queries, r, k, v)[0], *_some_heads(queries, r, k, v)[1:]) for r in range(P)]
    works = []
    for distance in range(1, P):
        to, source = (mine + distance) % P, (mine - distance) % P
        message = torch.cat([parts[to][0], parts[to][1][..., None]], dim=-1)
        room = torch.empty_like(message)
        works.append(ring.comm.exchange(send=(message,), to=to, receive=(room,), source=source))
    total = parts[mine]
    for work in works:
        (message,) = work.wait()
        total = merge_two(total, (message[..., :-1], message[..., -1]))
    return total[0]


def _some_heads(queries, rank, k, v):
    """The queries of one rank, with the K/V head of each of its heads."""
    own, H = queries[rank], sum(each.shape[1] for each in queries)
    heads = (torch.arange(own.shape[1]) + rank * own.shape[1]) // (H // k.shape[1])
    return own, k[:, heads], v[:, heads]


def prefill(ring, q, k, v, cached_k, cached_v, positions, cached):
    P, group = ring.world_size, q.shape[1] // k.shape[1]
    block = torch.cat([k, cached_k], dim=2), torch.cat([v, cached_v], dim=2)
    places = [torch.cat([positions[rank], cached[rank]]) for rank in range(P)]
    total = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf)
    for step in range(P):
        origin = ring.origin(step)
        work = None
        if step < P - 1:
            work = ring.post(*block, length=len(places[ring.origin(step + 1)]))
        later = places[origin][None, :] > positions[ring.rank][:, None]
        keys, values = (x.repeat_interleave(group, dim=1) for x in block)
        scores = (q @ keys.mT * q.shape[-1] ** -0.5).masked_fill(later, -math.inf)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
        total = merge_two(total, (weights @ values, lse))
        if work is not None:
            block = work.wait()
    return total


def bytes_sent(prefix, new, P, H, K, D, itemsize):
    hops, state = P - 1, itemsize if itemsize > 4 else 4
    block = (prefix // P + new // P) * K * D * 2 * itemsize
    rows = new // P * H
    return hops * block, hops * (rows * D * itemsize + rows * D * state + rows * state)
