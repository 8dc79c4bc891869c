"""Linear attention on one page: token by token, chunk by chunk, and over the ranks of a ring. Read it first.

Softmax attention keeps the keys and values of all tokens. Linear attention keeps a state: a matrix S of D ×
Dv numbers per head, in which a key finds the value that was written with it. Token t forgets a part of the
state (decay), corrects the value that the state already gives for its key (the delta rule, with beta), writes
its value, and reads with its query.

Rank r needs only the state after the tokens before its own tokens. `ringlab.scan.attention` is the same
algorithm with its own backward, packed documents, and scans of fewer rounds than a relay.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ringlab.comm.ring import Ring
from ringlab.types import Gate, Keys, State, Values


def recurrence(
    q: Keys,
    k: Keys,
    v: Values,
    decay: Gate,
    beta: Gate | None,
    state: State,
    scale: float,
) -> tuple[Values, State]:
    """Return the outputs and the last state, token by token."""
    outs = []
    for t in range(q.shape[2]):
        q_t, k_t, written = (x[:, :, t, :, None] for x in (q, k, v))
        state = decay[:, :, t, None, None].exp() * state
        if beta is not None:  # write only the difference to the value that the state already gives
            written = beta[:, :, t, None, None] * (written - state.mT @ k_t)
        state = state + k_t @ written.mT
        outs.append(scale * (state.mT @ q_t))
    return torch.cat([x.mT for x in outs] or [v], dim=2), state


def by_chunks(
    q: Keys, k: Keys, v: Values, decay: Gate, beta: Gate | None, state: State, scale: float, length: int
) -> tuple[Values, State]:
    """Return the outputs and the last state by chunks: a few matrix products replace `length` steps."""
    outs = []
    for start in range(0, q.shape[2], length):
        q_c, k_c, written = (x[:, :, start : start + length] for x in (q, k, v))
        g = decay[:, :, start : start + length, None]
        since = g.cumsum(2).exp()  # the fraction of the entering state that is left for token i
        # the fraction of token j's contribution that is left for token i
        between = g.expand(*g.shape[:3], g.shape[2]).tril(-1).cumsum(2).exp().tril()
        if beta is not None:
            # Each token needs the values that earlier tokens wrote. This triangular system is solved at once.
            beta_c = beta[:, :, start : start + length, None]
            coupling = (beta_c * between * (k_c @ k_c.mT)).tril(-1)
            right = beta_c * (written - since * (k_c @ state))
            written = torch.linalg.solve_triangular(coupling, right, upper=False, unitriangular=True)
        outs.append(scale * (since * (q_c @ state) + (between * (q_c @ k_c.mT)) @ written))
        state = since[:, :, -1:] * state + (between[..., -1, :, None] * k_c).mT @ written
    return torch.cat(outs or [v], dim=2), state


def relay(
    ring: Ring, q: Keys, k: Keys, v: Values, decay: Gate, beta: Gate | None, scale: float, length: int
) -> Values:
    """Return this rank's outputs. The state comes from the previous rank and goes on to the next.

    Ranks own stretches of tokens in the order of the sequence.
    """
    state = q.new_zeros((*v.shape[:2], q.shape[-1], v.shape[-1]))
    if ring.rank > 0:
        ring.comm.exchange(receive=(state,), source=ring.previous, tag="state").wait()
    out, state = by_chunks(q, k, v, decay, beta, state, scale, length)
    if ring.rank + 1 < ring.world_size:
        ring.comm.exchange(send=(state,), to=ring.next, tag="state").wait()
    return out


def affine_in_the_state(k: Float[Tensor, " D"], decay: float, beta: float) -> Tensor:
    """Return the transition of one token of one head, α (I − β k kᵀ), which multiplies any state.

    The product of all transitions of a rank is D × D. A rank can therefore send it to other ranks before a
    state arrives, so ranks need not wait for each other as they do in `relay`.

    >>> import torch
    >>> affine_in_the_state(torch.tensor([1.0, 0.0]), decay=1.0, beta=1.0)  # the old value of this key is gone
    tensor([[0., 0.],
            [0., 1.]])
    """
    return decay * (torch.eye(len(k)) - beta * torch.outer(k, k))
