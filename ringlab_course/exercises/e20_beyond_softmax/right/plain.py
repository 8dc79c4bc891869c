"""As the exercise suggests it."""

import torch


def chunk(q, k, v, decay, state):
    L = decay.shape[-1]
    below = torch.ones(L, L, dtype=torch.bool).tril(-1)
    sums = decay[..., None].expand(*decay.shape, L).masked_fill(~below, 0.0).cumsum(-2)
    between = sums.exp().tril()
    since = decay.cumsum(-1).exp()[..., None]
    out = since * (q @ state) + (between * (q @ k.mT)) @ v
    if L == 0:
        return out, state.clone()
    left = between[..., -1, :, None]
    return out, since[..., -1:, :] * state + (left * k).mT @ v


def transition(k, v, decay, beta):
    H, L, D = k.shape
    eye = torch.eye(D, dtype=k.dtype)
    A, B = eye.expand(H, D, D).clone(), k.new_zeros(H, D, v.shape[-1])
    for t in range(L):
        k_t, v_t, b_t = k[:, t, :, None], v[:, t, None, :], beta[:, t, None, None]
        step = decay[:, t, None, None].exp() * (eye - b_t * k_t * k_t.mT)
        A, B = step @ A, step @ B + b_t * k_t * v_t
    return A, B


def enter(ring, A, B):
    P, rank, distance = ring.world_size, ring.rank, 1
    before = None
    while distance < P:
        halves = {}
        if rank + distance < P:
            halves |= {"send": (A, B), "to": rank + distance}
        if rank >= distance:
            halves |= {"receive": (torch.empty_like(A), torch.empty_like(B)), "source": rank - distance}
        if halves:
            arrived = ring.comm.exchange(**halves).wait()
        if rank >= distance:
            A_0, B_0 = arrived
            before = (A_0, B_0) if before is None else (before[0] @ A_0, before[0] @ B_0 + before[1])
            A, B = A @ A_0, A @ B_0 + B
        distance *= 2
    return torch.zeros_like(B) if before is None else before[1]


def recurrence(q, k, v, decay, beta, state):
    outs = []
    for t in range(q.shape[1]):
        q_t, k_t, v_t = (x[:, t, :, None] for x in (q, k, v))
        state = decay[:, t, None, None].exp() * state
        state = state + k_t @ (beta[:, t, None, None] * (v_t - state.mT @ k_t)).mT
        outs.append((state.mT @ q_t)[..., 0])
    return torch.stack(outs, dim=1) if outs else torch.zeros_like(v)


def ring_linear(ring, q, k, v, decay, beta):
    A, B = transition(k, v, decay, beta)
    state = enter(ring, A, B)
    return recurrence(q, k, v, decay, beta, state)
