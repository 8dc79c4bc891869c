"""Common mistakes of 09.delta and 09.block, each with a function that makes the same one, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringlab import oracle
from ringlab_course.checking.backward import Gradients, pair, split, weights_of
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("09")


def _over(axis: int) -> Callable[..., np.ndarray]:
    return lambda dout, out: (oracle.float64(dout) * oracle.float64(out)).sum(axis)


DELTA = (
    mistake("sums_over_tokens", _over(-2)),
    mistake("sums_over_heads", _over(1)),
    mistake("takes_the_mean", lambda dout, out: (oracle.float64(dout) * oracle.float64(out)).mean(-1)),
    mistake("only_dout", lambda dout, out: oracle.float64(dout).sum(-1)),
    mistake("delta_in_bfloat16"),
)


def _pair(*, delta: float = 1.0, dq: float = 1.0, dk: float = 1.0) -> Callable[..., Gradients]:
    """The right gradients but for factors: of delta, and powers of 1/√D in dQ and dK."""

    def imitate(dout, q, k, v, lse, row_delta, mask=None) -> Gradients:
        found = pair(dout, q, k, v, lse, delta * oracle.float64(row_delta), mask)
        unit = q.shape[-1] ** -0.5
        return found[0] * unit ** (dq - 1), found[1] * unit ** (dk - 1), found[2]

    return imitate


def _own_lse(dout, q, k, v, lse, delta, mask=None) -> Gradients:
    own = oracle.attention(q, k, v, mask=None if mask is None else np.asarray(mask)).lse
    return pair(dout, q, k, v, own, delta, mask)


def _own_delta(dout, q, k, v, lse, delta, mask=None) -> Gradients:
    """Σ_j P_ij dP_ij over the keys of this block alone."""
    seen = None if mask is None else np.asarray(mask)
    q64, k64, v64, lse64, dout64 = map(oracle.float64, (q, k, v, lse, dout))
    weights = weights_of(q64, k64, lse64, seen, q.shape[-1] ** -0.5)
    dweights = split(dout64, k64) @ v64[:, :, None].swapaxes(-1, -2)
    return pair(dout, q, k, v, lse, (weights * dweights).sum(-1).reshape(lse64.shape), mask)


def _swapped(*inputs: Any) -> Gradients:
    dq, dk, dv = pair(*inputs)
    return dq, dv, dk


def _no_mask(dout, q, k, v, lse, delta, mask=None) -> Gradients:
    return pair(dout, q, k, v, lse, delta)


def _inverted(dout, q, k, v, lse, delta, mask=None) -> Gradients:
    return pair(dout, q, k, v, lse, delta, None if mask is None else ~np.asarray(mask))


def _mean(dout, q, k, v, lse, delta, mask=None) -> Gradients:
    dq, dk, dv = pair(dout, q, k, v, lse, delta, mask)
    group = q.shape[1] // k.shape[1]
    return dq, dk / group, dv / group


def _tiled_groups(dout, q, k, v, lse, delta, mask=None) -> Gradients:
    """Query head h with K/V head h mod K."""
    K, group = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (np.tile(oracle.float64(x), (1, group, 1, 1)) for x in (k, v))
    dq, dk, dv = pair(dout, q, k, v, lse, delta, mask)
    return dq, _folded(dk, group, K), _folded(dv, group, K)


def _mixed_groups(dout, q, k, v, lse, delta, mask=None) -> Gradients:
    """Query head h with K/V head h mod K, and what it adds to the gradients of K/V head h // (H / K)."""
    group = q.shape[1] // k.shape[1]
    tiled = (np.tile(oracle.float64(x), (1, group, 1, 1)) for x in (k, v))
    dq, dk, dv = pair(dout, q, *tiled, lse, delta, mask)
    return dq, split(dk, k).sum(2), split(dv, k).sum(2)


def _folded(x: np.ndarray, group: int, K: int) -> np.ndarray:
    return x.reshape(x.shape[0], group, K, *x.shape[2:]).sum(1)


def _first_head(dout, q, k, v, lse, delta, mask=None) -> Gradients:
    group = q.shape[1] // k.shape[1]
    dq, _, _ = pair(dout, q, k, v, lse, delta, mask)
    _, dk, dv = pair(*(x[:, ::group] for x in (dout, q)), k, v, *(x[:, ::group] for x in (lse, delta)), mask)
    return dq, dk, dv


BLOCK = (
    mistake("lse_of_the_block", _own_lse),
    mistake("no_delta", _pair(delta=0.0)),
    mistake("plus_delta", _pair(delta=-1.0)),
    mistake("delta_of_the_block", _own_delta),
    mistake("unscaled_dq", _pair(dq=0.0)),
    mistake("unscaled_dk", _pair(dk=0.0)),
    mistake("unscaled", _pair(dq=0.0, dk=0.0)),
    mistake("scales_twice", _pair(dq=2.0)),
    mistake("scales_dk_twice", _pair(dk=2.0)),
    mistake("swaps_dk_and_dv", _swapped),
    mistake("ignores_the_mask", _no_mask),
    mistake("mask_inverted", _inverted),
    mistake("mean_over_the_group", _mean),
    mistake("wrong_groups", _tiled_groups),
    mistake("mixes_the_groups", _mixed_groups),
    mistake("first_head_of_the_group", _first_head),
    mistake("nan_in_blind_rows"),
    mistake("overflows"),
    mistake("block_in_bfloat16"),
)
