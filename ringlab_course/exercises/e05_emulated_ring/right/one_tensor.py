"""K and V travel as one tensor; the state is kept unnormalised inside a step."""


def ring_step(q, k, v, out, lse, mask=None):
    rep = q.shape[1] // k.shape[1]
    dt = out.dtype
    kk = k.to(dt)[:, :, None].expand(-1, -1, rep, -1, -1).flatten(1, 2)
    vv = v.to(dt)[:, :, None].expand(-1, -1, rep, -1, -1).flatten(1, 2)
    s = torch.matmul(q.to(dt), kk.transpose(2, 3)).mul_(q.size(-1) ** -0.5)
    if mask is not None:
        s += torch.zeros(mask.shape, dtype=dt).masked_fill_(mask.logical_not(), -math.inf)
    block_lse = s.logsumexp(-1)
    block_out = torch.softmax(s, -1).nan_to_num(0.0) @ vv
    new_lse = torch.logaddexp(lse, block_lse)
    a = torch.exp(lse - new_lse).nan_to_num(0.0)[..., None]
    b = torch.exp(block_lse - new_lse).nan_to_num(0.0)[..., None]
    return a * out + b * block_out, new_lse


def empty(q):
    dt = torch.promote_types(q.dtype, torch.float32)
    return q.new_zeros(q.shape, dtype=dt), q.new_full(q.shape[:-1], -math.inf, dtype=dt)


def ring_forward(ring, q, k, v):
    state, kv = empty(q), torch.cat([k, v], dim=-1)
    D = k.shape[-1]
    hops = ring.world_size - 1
    while True:
        state = ring_step(q, kv[..., :D], kv[..., D:], *state)
        if hops == 0:
            return state
        kv = ring.shift(kv)
        hops -= 1


def ring_forward_causal(ring, q, k, v, positions):
    state, D = empty(q), k.shape[-1]
    for step in range(ring.world_size):
        source = (ring.rank - step) % ring.world_size
        mask = (positions[source].view(1, -1) > positions[ring.rank].view(-1, 1)).logical_not()
        state = ring_step(q, k, v, *state, mask)
        if step != ring.world_size - 1:
            due = positions[(source - 1) % ring.world_size].shape[0]
            k, v = ring.post(k, v, length=due).wait()
    return state
