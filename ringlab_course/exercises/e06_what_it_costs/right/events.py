"""A makespan by recursion over (rank, step), two fixed receive buffers, FLOPs summed element by element."""

from functools import cache


def least_tokens(flops_per_s, rate, unit, directions, *, element_bytes=2, group=1, causal=False):
    """Set both times for one token, D = H = 1: they grow like c² and like c."""
    bytes_per_s = rate * 1e9 / directions
    if unit == "Gbit/s":
        bytes_per_s /= 8
    step_s = (2 * 2 / (2 if causal else 1)) / flops_per_s
    hop_s = 2 * element_bytes / group / bytes_per_s
    return np.float64(hop_s / step_s)


def makespan(compute_s, hop_s, overlapped):
    P = len(hop_s)

    @cache
    def ready(rank, step):
        if step == 0:
            return 0.0
        return max(done(rank, step - 1), message(rank, step - 1), message((rank - 1) % P, step - 1))

    def done(rank, step):
        return ready(rank, step) + compute_s[rank][step]

    def message(rank, step):
        posted = ready if overlapped else done
        return max(posted(rank, step), posted((rank + 1) % P, step)) + hop_s[rank]

    return max(done(rank, P - 1) for rank in range(P))


def attend(q, k, v):
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.to(dtype) @ k.mT / math.sqrt(q.shape[-1])
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[..., None]) @ v, lse


def overlapped_ring(ring, q, k, v, pieces):
    """Own receive buffers, each used again once its piece has been sent on."""
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:-1], -math.inf)
    here = list(zip(k.tensor_split(pieces, -2), v.tensor_split(pieces, -2), strict=True))
    free = {}  # by number of tokens
    for step in range(ring.world_size):
        for number in range(pieces):
            work, piece = None, here[number]
            tokens = piece[0].shape[-2]
            if step + 1 < ring.world_size:
                into = free.pop(tokens, None) or tuple(x.new_empty(x.shape) for x in piece)
                work = ring.post(*piece, into=into)
            part, part_lse = ring.compute(f"attend {step}", attend, q, *piece)
            total = torch.logaddexp(lse, part_lse)
            out = out * torch.exp(lse - total)[..., None] + part * torch.exp(part_lse - total)[..., None]
            lse = total
            if work:
                work.wait()
                here[number] = into
                if step:  # step 0 has the caller's own shard, which must not become a receive buffer
                    free[tokens] = piece
    return out, lse


def max_speedup(model, ranks, tokens, attention_weight=1.0):
    c = tokens // ranks
    blocks = [[1.0 if k < q else 0.5 if k == q else 0.0 for k in range(ranks)] for q in range(ranks)]
    slowest = max(sum(row) for row in blocks)
    mean = sum(map(sum, blocks)) / ranks
    matrices = [(model["d_model"], model["d_model"])] * 4 + [(model["d_model"], model["d_ff"])] * model["ffn_matrices"]
    weights = model["layers"] * sum(rows * columns for rows, columns in matrices) + model["d_model"] * model["vocabulary"]

    def seconds(share):
        return 2 * c * weights + attention_weight * model["layers"] * share * c * c * 4 * model["d_model"]

    return seconds(slowest) / seconds(mean)
