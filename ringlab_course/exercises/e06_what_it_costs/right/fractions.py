"""Units one after the other, times as a graph with memory, the ring unrolled."""

from functools import lru_cache, partial


def attend(q, k, v):
    return get_block("naive", q).forward(q, k, v, causal=False, scale=q.shape[-1] ** -0.5)


def least_tokens(flops_per_s, rate, unit, directions, *, element_bytes=2, group=1, causal=False):
    giga = {"GB/s": 1e9, "Gbit/s": 1e9 / 8}
    one_way = rate * giga[unit] / directions
    seconds_per_token = 2 * element_bytes / group / one_way
    flops_per_token_squared = 2 * 2 * (0.5 if causal else 1)
    return np.float64(seconds_per_token / (flops_per_token_squared / flops_per_s))


def makespan(compute_s, hop_s, overlapped):
    P = hop_s.size

    @lru_cache(maxsize=None)
    def begins(rank, step):
        if step == 0:
            return 0.0
        return max(ends(rank, step - 1), arrives(rank, step - 1), arrives((rank + 1) % P, step - 1))

    @lru_cache(maxsize=None)
    def ends(rank, step):
        return begins(rank, step) + compute_s[rank, step]

    def posts(rank, step):
        return begins(rank, step) if overlapped else ends(rank, step)

    @lru_cache(maxsize=None)
    def arrives(rank, step):
        """The message into `rank`."""
        return max(posts(rank, step), posts((rank - 1) % P, step)) + hop_s[(rank - 1) % P]

    return max(map(partial(ends, step=P - 1), range(P)))


def overlapped_ring(ring, q, k, v, pieces):
    *hops, final = range(ring.world_size)
    block = {i: (x, y) for i, (x, y) in enumerate(zip(torch.tensor_split(k, pieces, 2), torch.tensor_split(v, pieces, 2)))}
    partials = []
    for hop in hops:
        for i in range(pieces):
            arriving = ring.post(*block[i])
            partials.append(ring.compute(f"block {ring.origin(hop)}", attend, q, *block[i]))
            if len(partials) == 2:
                partials = [merge(*partials)]
            block[i] = arriving.wait()
    for piece in block.values():
        partials.append(ring.compute(f"block {ring.origin(final)}", attend, q, *piece))
        if len(partials) == 2:
            partials = [merge(*partials)]
    return tuple((partials[0].out, partials[0].lse))


def max_speedup(model, ranks, tokens, attention_weight=1.0):
    per_rank = tokens // ranks if tokens % ranks == 0 else tokens / ranks
    d = model["d_model"]
    matrices = [(d, d)] * 4 + [(d, model["d_ff"])] * model["ffn_matrices"]
    linear = sum(2 * per_rank * rows * columns for rows, columns in matrices) * model["layers"]
    linear += 2 * per_rank * d * model["vocabulary"]

    def attention(elements):
        return attention_weight * model["layers"] * 2 * (2 * elements * d)

    slowest = (ranks - 1) * per_rank**2 + per_rank**2 / 2
    balanced = (ranks * per_rank) ** 2 / 2 / ranks
    return (linear + attention(slowest)) / (linear + attention(balanced))
