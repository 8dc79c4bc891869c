"""As the solution has it, in other words."""


def least_tokens(flops_per_s, rate, unit, directions, *, element_bytes=2, group=1, causal=False):
    link = {"GB/s": 1e9, "Gbit/s": 1e9 / 8}[unit] * rate / directions
    return element_bytes * flops_per_s / (2 * link) / group * (1 + causal)


def makespan(compute_s, hop_s, overlapped):
    P = len(hop_s)
    ready = np.zeros(P)
    for step in range(P):
        done = ready + compute_s[:, step]
        if step == P - 1:
            return done.max()
        posted = ready if overlapped else done
        sent = np.maximum(posted, np.roll(posted, -1)) + hop_s
        ready = np.maximum(done, np.maximum(sent, np.roll(sent, 1)))


def attend(q, k, v):
    return get_block("blockwise", q).forward(q, k, v, causal=False, scale=1 / math.sqrt(q.shape[-1]))


def overlapped_ring(ring, q, k, v, pieces):
    state, tokens = Partial.identity(q), k.shape[-2]
    cuts = [tokens * number // pieces for number in range(pieces + 1)]
    spans = [slice(begin, end) for begin, end in zip(cuts, cuts[1:])]
    keys, values = [k[..., span, :] for span in spans], [v[..., span, :] for span in spans]
    for step in range(ring.world_size - 1):
        for i in range(pieces):
            work = ring.post(keys[i], values[i])
            state = merge(state, ring.compute(f"step {step}", attend, q, keys[i], values[i]))
            keys[i], values[i] = work.wait()
    for i in range(pieces):
        state = merge(state, ring.compute("last", attend, q, keys[i], values[i]))
    return state.out, state.lse


def max_speedup(model, ranks, tokens, attention_weight=1.0):
    c, d = tokens / ranks, model["d_model"]
    linear = 2 * c * (model["layers"] * d * (4 * d + model["ffn_matrices"] * model["d_ff"]) + d * model["vocabulary"])
    attention = 4 * d * c**2 * model["layers"] * attention_weight
    return (linear + attention * (ranks - 0.5)) / (linear + attention * ranks / 2)
