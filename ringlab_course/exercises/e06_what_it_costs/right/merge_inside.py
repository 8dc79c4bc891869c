"""Merges inside of the computation, posts through a helper; a makespan as a search for the latest path."""


def least_tokens(flops_per_s, rate, unit, directions, *, element_bytes=2, group=1, causal=False):
    per_second = rate * 10**9 / directions
    if unit == "Gbit/s":
        per_second = per_second / 8
    low, high = 0.0, 1e18
    for _ in range(200):
        c = (low + high) / 2
        pairs = c * c / 2 if causal else c * c
        hidden = 4 * pairs * group / flops_per_s >= 2 * c * element_bytes / per_second
        low, high = (low, c) if hidden else (c, high)
    return high


def makespan(compute_s, hop_s, overlapped):
    compute_s, hop_s = np.asarray(compute_s), np.asarray(hop_s)
    P = len(hop_s)
    clock = [0.0] * P
    for step in range(P):
        begin = list(clock)
        clock = [clock[rank] + float(compute_s[rank, step]) for rank in range(P)]
        if step == P - 1:
            break
        posted = begin if overlapped else list(clock)
        over = [max(posted[rank], posted[(rank + 1) % P]) + float(hop_s[rank]) for rank in range(P)]
        clock = [max(clock[rank], over[rank], over[rank - 1]) for rank in range(P)]
    return torch.tensor(max(clock), dtype=torch.float64)


def attend(q, k, v, state):
    q, k, v = q.float(), *(x.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return merge(state, Partial(scores.softmax(-1) @ v, scores.logsumexp(-1)))


def rounds(ring, k, v, pieces):
    """Yield each piece with its exchange under way."""
    block = [torch.stack(pair) for pair in zip(k.tensor_split(pieces, dim=-2), v.tensor_split(pieces, dim=-2))]
    for _ in range(ring.world_size - 1):
        for number in range(pieces):
            work = ring.post(block[number], release_after_send=False)
            yield block[number]
            (block[number],) = work.wait()
    yield from block


def overlapped_ring(ring, q, k, v, pieces):
    state = Partial(torch.zeros(q.shape), torch.full(q.shape[:-1], -math.inf))
    for both in rounds(ring, k, v, pieces):
        state = ring.compute("attend and merge", attend, q, *both, state)
    return state.out, state.lse


def max_speedup(model, ranks, tokens, attention_weight=1.0):
    n, d = float(tokens), model["d_model"]
    per_token = 2 * model["layers"] * (4 * d**2 + model["ffn_matrices"] * d * model["d_ff"]) + 2 * d * model["vocabulary"]
    linear = per_token * n / ranks
    whole = 4 * d * n * n * model["layers"] * attention_weight  # every pair of the sequence
    return (linear + whole * (ranks - 0.5) / ranks**2) / (linear + whole / 2 / ranks)
