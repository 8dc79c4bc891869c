"""Common mistakes of 09.delta and 09.block, each with a function that makes the same one, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringlab import oracle
from ringlab.course.contract import Misconception
from ringlab.course.contracts.e09_truth import Gradients, pair, split, weights_of


def _over(axis: int) -> Callable[..., np.ndarray]:
    return lambda dout, out: (oracle.float64(dout) * oracle.float64(out)).sum(axis)


DELTA = (
    Misconception(
        "sums_over_tokens",
        "The sum ran over the tokens. delta belongs to a row: sum over the last axis, D, and keep one number per query.",
        _over(-2),
    ),
    Misconception(
        "sums_over_heads",
        "The sum ran over the heads. Every head has a softmax of its own, and so a delta of its own: sum over the last axis, D.",
        _over(1),
    ),
    Misconception(
        "takes_the_mean",
        "delta is the mean of dO ∘ O over D where it should be the sum: Σ_j P_ij dP_ij is a sum over products, not divided by anything.",
        lambda dout, out: (oracle.float64(dout) * oracle.float64(out)).mean(-1),
    ),
    Misconception(
        "only_dout",
        "O is not in it: delta is rowsum(dO ∘ O), and this is rowsum(dO).",
        lambda dout, out: oracle.float64(dout).sum(-1),
    ),
    Misconception(
        "delta_in_bfloat16",
        "The product or the sum was rounded to bfloat16. delta is subtracted from dP, and where the two are nearly equal such a rounding "
        "is all that is left: convert dO to the dtype of out first.",
    ),
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
    Misconception(
        "lse_of_the_block",
        "The weights were normalised over the keys that are here. A block has a share of a row's weights, e^(s − lse) with the lse over "
        "ALL keys, and its rows add up to less than 1. Use the lse that you are given.",
        _own_lse,
    ),
    Misconception(
        "no_delta",
        "dS = P·dP lacks − delta: raising one score lowers all the other weights of its row.",
        _pair(delta=0.0),
    ),
    Misconception(
        "plus_delta",
        "delta has the wrong sign: dS = P·(dP − delta), so that the rows of dS add up to 0 over all keys.",
        _pair(delta=-1.0),
    ),
    Misconception(
        "delta_of_the_block",
        "delta was summed over the keys that are here. It is Σ_j P_ij dP_ij over ALL keys of the row, and so the rows of one block's dS "
        "do not add up to 0. Use the delta that you are given.",
        _own_delta,
    ),
    Misconception(
        "unscaled_dq",
        "dQ lacks the factor 1/√D that dK has. Scores are q·k/√D, so both carry it.",
        _pair(dq=0.0),
    ),
    Misconception(
        "unscaled_dk",
        "dK lacks the factor 1/√D that dQ has. Scores are q·k/√D, so both carry it.",
        _pair(dk=0.0),
    ),
    Misconception(
        "unscaled",
        "dQ and dK both lack the factor 1/√D: dS is the gradient of the scaled scores.",
        _pair(dq=0.0, dk=0.0),
    ),
    Misconception(
        "scales_twice",
        "dQ has the factor 1/√D twice. If q was scaled before the product, dK has its factor already, and dQ needs it once.",
        _pair(dq=2.0),
    ),
    Misconception(
        "scales_dk_twice",
        "dK has the factor 1/√D twice: q was scaled for the scores, and that scaled q used again for dK with another factor.",
        _pair(dk=2.0),
    ),
    Misconception(
        "swaps_dk_and_dv",
        "dK and dV have changed places: dK comes of dS and Q, dV of P and dO.",
        _swapped,
    ),
    Misconception(
        "ignores_the_mask",
        "The mask was not used when P was computed again: hidden keys get a gradient. Hide what the forward hid.",
        _no_mask,
    ),
    Misconception(
        "mask_inverted",
        "The mask is taken the wrong way round: True means that the query may see the key.",
        _inverted,
    ),
    Misconception(
        "mean_over_the_group",
        "dK and dV of a shared head are the mean over the heads that share it. Each of those heads uses the key, so their gradients add up.",
        _mean,
    ),
    Misconception(
        "wrong_groups",
        "Heads were paired in the wrong order: query head h reads K/V head h // (H // K), so neighbours share one.",
        _tiled_groups,
    ),
    Misconception(
        "mixes_the_groups",
        "Forward and back, heads are grouped in two ways: query head h was given K/V head h % K, and its gradients to K/V head "
        "h // (H // K). It is h // (H // K) both times: neighbours share one.",
        _mixed_groups,
    ),
    Misconception(
        "first_head_of_the_group",
        "dK and dV hold what the first head of each group adds, and the others are lost: sum over the heads that share a K/V head.",
        _first_head,
    ),
    Misconception(
        "nan_in_blind_rows",
        "There is a NaN, and there is a row that sees no key at all: its lse is −inf, and −inf − (−inf) is NaN. Its weights, and all it "
        "adds, are 0.",
    ),
    Misconception(
        "overflows",
        "There is a NaN for large scores: exp of a raw score or of a raw lse is infinite beyond 88 in float32. Take exp of the difference.",
    ),
    Misconception(
        "block_in_bfloat16",
        "Something was computed or returned in bfloat16, which has 8 bits. Convert q, k, v and dO to the dtype of lse first, and return the "
        "gradients in it.",
    ),
)
