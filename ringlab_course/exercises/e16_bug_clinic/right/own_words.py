"""Other charts, and other small changes to each patient."""


CHARTS = {
    "ash": {"fault": "blind rows", "check": "masks", "case": {"ranks": 2, "tokens": 2, "layout": "zigzag"}, "matters": ["causal", "layout"]},
    "birch": {"fault": "lost sum", "check": "sloped logits", "case": {"ranks": 2, "tokens": 2, "causal": False}, "matters": []},
    "cedar": {"fault": "masks by rank", "check": "causality", "case": {"ranks": 2, "tokens": 2, "layout": "zigzag", "dtype": "bfloat16"}, "matters": ["layout", "causal"]},
    "elm": {"fault": "one hop too many", "check": "bytes", "case": {"ranks": 2, "tokens": 1}, "matters": []},
    "fir": {"fault": "keys as values", "check": "lse", "case": {"ranks": 3, "tokens": 1}, "matters": []},
    "hazel": {"fault": "couriers backwards", "check": "masks", "case": dict(ranks=3, tokens=1, layout="zigzag"), "matters": ()},
    "larch": {"fault": "shared memory", "check": "large logits", "case": dict(ranks=2, tokens=1, layout="striped", causal=False), "matters": ("dtype",)},
    "oak": {"fault": "first block", "check": "error growth", "case": {"ranks": 2, "tokens": 1, "dtype": "bfloat16"}, "matters": []},
}


def chart(patient):
    return CHARTS.get(patient)


def ash(ring, q, k, v, positions, causal=True):
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        if visible.any():
            scores = scores_of(q, k, visible)
            top = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - top.clamp_min(-1e30))
            total = weights.sum(-1, keepdim=True)
            block_lse = (top + total.log())[..., 0]
            merged = torch.logaddexp(lse, block_lse)
            old, new = (torch.exp(x - merged.clamp_min(-1e30))[..., None] for x in (lse, block_lse))
            out, lse = out * old + weights @ v.to(out.dtype) / total.clamp_min(1e-30) * new, merged
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse


def birch(ring, q, k, v, positions, causal=True):
    out, top = nothing_seen(q)
    total = torch.zeros_like(top)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        if k.shape[-2]:
            scores = scores_of(q, k, sees(positions, ring.rank, ring.origin(step), causal))
            new_top = torch.maximum(top, scores.amax(-1))
            safe = new_top.masked_fill(new_top == -math.inf, 0.0)
            kept, weights = torch.exp(top - safe), torch.exp(scores - safe[..., None])
            total = total * kept + weights.sum(-1)
            out = out * kept[..., None] + weights @ v.to(out.dtype)
            top = new_top
        if work is not None:
            k, v = work.wait()
    out = out / torch.where(total > 0, total, 1.0)[..., None]
    return out.to(q.dtype), top + total.log()


def cedar(ring, q, k, v, positions, causal=True):
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last, origin = step == ring.world_size - 1, ring.origin(step)
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        mine, theirs = positions[ring.rank], positions[origin]
        visible = theirs[None] <= mine[:, None]  # by position
        if not causal:
            visible = torch.ones_like(visible)
        out, lse = attend(q, k, v, visible, out, lse)
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse


def elm(ring, q, k, v, positions, causal=True):
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if step + 1 == ring.world_size:
            break
        if ring.world_size > 1:
            k, v = ring.shift(k, v, length=len(positions[ring.origin(step + 1)]))
    return out.to(q.dtype), lse


def fir(ring, q, k, v, positions, causal=True):
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if step == ring.world_size - 1:
            break
        length = len(positions[ring.origin(step + 1)])
        if ring.rank % 2 == 0:
            send(ring, k)
            send(ring, v)
            k, v = receive(ring, k, length), receive(ring, v, length)
        else:
            next_k, next_v = receive(ring, k, length), receive(ring, v, length)
            for block in (k, v):
                send(ring, block)
            k, v = next_k, next_v
    return out.to(q.dtype), lse


def hazel(ring, dout, q, k, v, out, lse, positions, causal=True):
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        length = len(positions[ring.origin(step + 1)])
        if P > 1:
            room = tuple(x.new_empty((*x.shape[:-2], length, x.shape[-1])) for x in (dk, dv))
            back = ring.comm.exchange(
                send=(dk, dv), to=ring.next, receive=room, source=ring.previous, tag="dkv"
            )
            dk, dv = back.wait()
        if step < P - 1:
            k, v = ring.shift(k, v, length=length, tag="kv")
    return dq, dk, dv


def larch(ring, dout, q, k, v, out, lse, positions, causal=True):
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (k, v))
    scratch, dq = torch.empty_like(q), None
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        scratch.copy_(part[0])
        if dq is None:
            dq = scratch.to(lse.dtype, copy=True)
        else:
            dq += scratch.to(lse.dtype)
        dk, dv = dk + part[1], dv + part[2]
        length = len(positions[ring.origin(step + 1)])
        if P > 1:
            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")
        if step < P - 1:
            k, v = ring.shift(k, v, length=length, tag="kv")
    return dq, dk, dv


def oak(ring, dout, q, k, v, out, lse, positions, causal=True):
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    block = k, v
    for step in range(P):
        length = len(positions[ring.origin(step + 1)])
        work = ring.post(*block, length=length, tag="kv") if step < P - 1 else None
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, *block, lse, delta, visible)
        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        if P > 1:
            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")
        if work is not None:
            block = work.wait()
    return dq, dk, dv
