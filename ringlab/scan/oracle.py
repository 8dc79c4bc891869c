"""The oracle of linear attention: the recurrence in float64 NumPy, token by token, and its gradients by hand.

Per head, a state S of D × Dv numbers passes from token to token. With decay α_t = e^(g_t) and β_t,

    R_t = α_t S_{t−1}                                 the part of the state that is left
    u_t = v_t,  or  β_t (v_t − R_tᵀ k_t)              the value that is written; with β, the delta rule
    S_t = R_t + k_t u_tᵀ                              o_t = scale · S_tᵀ q_t

With β, S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ (arXiv 2412.06464). Without decay α_t is 1. The
gradient G of the state goes back from token to token, beginning with that of the last state:

    G += scale · q_t do_tᵀ        dq_t = scale · S_t do_t       dk_t = G u_t        du_t = Gᵀ k_t
    dv_t = du_t,  or with β:      dv_t = β_t du_t               dβ_t = du_t · (v_t − R_tᵀ k_t)
                                  dk_t −= R_t dv_t              G −= k_t dv_tᵀ
    dg_t = Σ G ∘ R_t              G ← α_t G

Where a packed document begins, S_{t−1} is 0 and no gradient goes back. Arrays are (B, heads, S, D). Torch
tensors are also accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float, Float64

from ringlab.oracle import float64

Key: TypeAlias = Float[Any, "B K S D"]
Value: TypeAlias = Float[Any, "B H S Dv"]
Gate: TypeAlias = Float[Any, "B H S"]
State: TypeAlias = Float[Any, "B H D Dv"]


class Result(NamedTuple):
    """`out` of every token, and the `state` after the last one."""

    out: Float64[np.ndarray, "B H S Dv"]
    state: Float64[np.ndarray, "B H D Dv"]


class Gradients(NamedTuple):
    """The gradients, in the shapes of the inputs. ddecay and dbeta exist even without decay and beta."""

    dq: Float64[np.ndarray, "B K S D"]
    dk: Float64[np.ndarray, "B K S D"]
    dv: Float64[np.ndarray, "B H S Dv"]
    ddecay: Float64[np.ndarray, "B H S"]
    dbeta: Float64[np.ndarray, "B H S"]
    dinitial: Float64[np.ndarray, "B H D Dv"]


class _Inputs(NamedTuple):
    """All inputs in float64: q and k repeated for each head of v; decay as α (0 where a document begins)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray | None
    scale: float
    initial: np.ndarray


def linear_attention(
    q: Key,
    k: Key,
    v: Value,
    *,
    decay: Gate | None = None,
    beta: Gate | None = None,
    scale: float | None = None,
    documents: Sequence[int] = (),
    initial_state: State | None = None,
) -> Result:
    """Return out and the last state; head h of v uses head h // (H // K) of q and k.

    decay: natural logarithms g_t of the factors. scale: D^−½ by default.
    documents: the lengths of packed documents, in order; the state is 0 where a document begins.
    initial_state: the state before the first token, zeros by default; only the first document sees it.

    >>> import numpy as np
    >>> from ringlab.scan import oracle
    >>> ones = np.ones((1, 1, 3, 1))  # three tokens of one head
    >>> oracle.linear_attention(ones, ones, ones).out.ravel()  # how many tokens there have been
    array([1., 2., 3.])
    >>> oracle.linear_attention(ones, ones, ones, beta=ones[..., 0]).out.ravel()  # the same value, written again
    array([1., 1., 1.])
    """
    given = _inputs(q, k, v, decay, beta, scale, documents, initial_state)
    states, _ = _states(given)
    out = given.scale * np.einsum("sbhde,bhsd->bhse", states[1:], given.q)
    return Result(out, states[-1])


def gradients(
    q: Key,
    k: Key,
    v: Value,
    dout: Value,
    *,
    decay: Gate | None = None,
    beta: Gate | None = None,
    scale: float | None = None,
    documents: Sequence[int] = (),
    initial_state: State | None = None,
    dstate: State | None = None,
) -> Gradients:
    """Return the gradients of Σ dout · out + Σ dstate · state. Other arguments: as in `linear_attention`.

    >>> import numpy as np
    >>> from ringlab.scan import oracle
    >>> ones = np.ones((1, 1, 3, 1))
    >>> oracle.gradients(ones, ones, ones, ones).dv.ravel()  # the first value is in three outputs
    array([3., 2., 1.])
    """
    given = _inputs(q, k, v, decay, beta, scale, documents, initial_state)
    states, written = _states(given)
    dout = float64(dout)
    dq, dk, dv = np.zeros_like(given.q), np.zeros_like(given.k), np.zeros_like(given.v)
    ddecay, dbeta = np.zeros_like(given.alpha), np.zeros_like(given.alpha)
    G = np.zeros_like(states[0]) if dstate is None else float64(dstate).copy()
    for t in reversed(range(given.q.shape[2])):
        q_t, k_t, do_t = (x[:, :, t, :, None] for x in (given.q, given.k, dout))
        left = given.alpha[:, :, t, None, None] * states[t]
        G = G + given.scale * q_t * do_t.mT
        dq[:, :, t] = (given.scale * states[t + 1] @ do_t)[..., 0]
        dk[:, :, t] = (G @ written[t])[..., 0]
        dv_t = G.mT @ k_t
        if given.beta is not None:
            missing = given.v[:, :, t, :, None] - left.mT @ k_t
            dbeta[:, :, t] = (dv_t * missing).sum((-1, -2))
            dv_t = given.beta[:, :, t, None, None] * dv_t
            dk[:, :, t] -= (left @ dv_t)[..., 0]
            G = G - k_t * dv_t.mT
        dv[:, :, t] = dv_t[..., 0]
        ddecay[:, :, t] = (G * left).sum((-1, -2))
        G = given.alpha[:, :, t, None, None] * G
    K = float64(q).shape[1]
    return Gradients(_shared(dq, K), _shared(dk, K), dv, ddecay, dbeta, G)


def _states(given: _Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Return the S + 1 states before and after each token, and the values written, (S, B, H, Dv, 1)."""
    states, written = [given.initial], [np.zeros((0, *given.v.shape[:2], given.v.shape[3], 1))]
    for t in range(given.q.shape[2]):
        left = given.alpha[:, :, t, None, None] * states[-1]
        k_t, u_t = given.k[:, :, t, :, None], given.v[:, :, t, :, None]
        if given.beta is not None:
            u_t = given.beta[:, :, t, None, None] * (u_t - left.mT @ k_t)
        states.append(left + k_t * u_t.mT)
        written.append(u_t[None])
    return np.stack(states), np.concatenate(written)


def _inputs(
    q: Any, k: Any, v: Any, decay: Any, beta: Any, scale: Any, documents: Sequence[int], initial: Any
) -> _Inputs:
    q, k, v = float64(q), float64(k), float64(v)
    (B, H, S, Dv), D, repeats = v.shape, q.shape[3], v.shape[1] // q.shape[1]
    alpha = np.ones((B, H, S)) if decay is None else np.exp(float64(decay))
    starts = np.cumsum(np.array(documents, np.int64))[:-1]
    alpha[:, :, starts[starts < S]] = 0.0
    return _Inputs(
        np.repeat(q, repeats, axis=1),
        np.repeat(k, repeats, axis=1),
        v,
        alpha,
        None if beta is None else float64(beta),
        D**-0.5 if scale is None else scale,
        np.zeros((B, H, D, Dv)) if initial is None else float64(initial),
    )


def _shared(gradient: np.ndarray, K: int) -> np.ndarray:
    """Return the sum over the heads of v that share one of the K heads."""
    B, H, S, D = gradient.shape
    return gradient.reshape(B, K, H // K, S, D).sum(2)
