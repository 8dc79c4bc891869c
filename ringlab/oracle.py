"""The oracle: exact attention in float64 NumPy, with lse and gradients. All other code is compared with it.

For query i and key j of one head, with scores s_ij = scale · q_i·k_j over the visible pairs (i, j):

    lse_i = ln Σ_j e^s_ij        p_ij = e^(s_ij − lse_i)        out_i = Σ_j p_ij v_j
    dV_j = Σ_i p_ij dO_i         dS_ij = p_ij (dO_i·v_j − delta_i + dlse_i),  delta_i = Σ_j p_ij dO_i·v_j
    dQ_i = scale Σ_j dS_ij k_j   dK_j = scale Σ_i dS_ij q_i

With a `softcap` c, scores become c·tanh(s_ij/c), and dS_ij gains the factor 1 − tanh²(s_ij/c). With dropout `factors` f,
each 0 or 1/(1−p), out_i = Σ_j f_ij p_ij v_j; f_ij multiplies p_ij in dV_j and dO_i·v_j in dS_ij and delta_i. With `sinks`,
a logit z of each query head, lse_i = ln(e^z + Σ_j e^s_ij): the sink takes weight but contributes no value.

Sums run over visible pairs only, so a NaN or infinity at a masked position never changes a result (0 · NaN is
NaN). Axis letters are those of `ringlab.types`, and arrays are (B, H, L, D). Torch tensors of any dtype and
device are also accepted, but this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Float64

from ringlab.errors import DtypeError, ShapeError

Query: TypeAlias = Float[Any, "B H Lq D"]
Key: TypeAlias = Float[Any, "B K Lk D"]
Value: TypeAlias = Float[Any, "B K Lk Dv"]
Out: TypeAlias = Float[Any, "B H Lq Dv"]
Mask: TypeAlias = Bool[Any, "#B #H #Lq #Lk"]
Factors: TypeAlias = Float[Any, "#B #H #Lq #Lk"]
Sinks: TypeAlias = Float[Any, " H"]
# Arrays of one head. The rows of a matrix are queries and its columns are keys, or the reverse.
Vectors: TypeAlias = Float64[np.ndarray, "columns D"]
Matrix: TypeAlias = Float64[np.ndarray, "rows columns"]
Visible: TypeAlias = Bool[np.ndarray, "rows columns"]
Column: TypeAlias = Float64[np.ndarray, "rows"]

TILE_ELEMENTS = 2**21
"""The largest number of scores in memory at once. Long sequences are computed a few query rows at a time."""


class Result(NamedTuple):
    """`out` (B, H, Lq, Dv) and `lse` (B, H, Lq).

    A row that sees no key has out 0, and lse −inf if there is no sink.
    """

    out: Float64[np.ndarray, "B H Lq Dv"]
    lse: Float64[np.ndarray, "B H Lq"]


class _Scoring(NamedTuple):
    """The arguments of `attention` that change scores and weights, broadcast to the shapes of the inputs."""

    causal: bool
    mask: Bool[np.ndarray, "B H Lq Lk"]
    scale: float
    softcap: float | None
    factors: Float64[np.ndarray, "B H Lq Lk"]
    sinks: Float64[np.ndarray, " H"]


class Gradients(NamedTuple):
    """`dq`, `dk` and `dv` in the shapes of q, k and v. dk and dv are summed over query heads."""

    dq: Float64[np.ndarray, "B H Lq D"]
    dk: Float64[np.ndarray, "B K Lk D"]
    dv: Float64[np.ndarray, "B K Lk Dv"]


def attention(
    q: Query,
    k: Key,
    v: Value,
    *,
    causal: bool = False,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    factors: Factors | None = None,
    sinks: Sinks | None = None,
) -> Result:
    """Return softmax(scale · q kᵀ) v and the natural-log lse, in float64.

    Query head h uses key/value head h // (H // K).
    causal: query i sees no key after i (aligned top-left).
    mask: True where a query may see a key; broadcasts to (B, H, Lq, Lk); may be combined with `causal`.
    scale: D ** −0.5 by default.
    softcap, factors, sinks: as in the module's docstring. factors broadcast as `mask` does. lse includes
    dropped weights. The head dim of v may differ from that of q and k. out has the head dim of v.

    Raises: ShapeError for axes that do not fit; DtypeError for a mask that is not boolean.

    >>> from ringlab.oracle import attention
    >>> out, lse = attention([[[[0.0]]]], [[[[0.0], [0.0]]]], [[[[1.0], [3.0]]]])
    >>> float(out.squeeze()), round(float(lse.squeeze()), 4)  # the mean of 1 and 3; ln 2
    (2.0, 0.6931)
    """
    q, k, v = _checked(q, k, v)
    scoring = _resolved(q, k, causal, mask, scale, softcap, factors, sinks)
    out, lse = np.zeros((*q.shape[:-1], v.shape[-1])), np.full(q.shape[:-1], -np.inf)
    with np.errstate(all="ignore"):
        for query, kv, rows in _pieces(q, k):
            weights, visible, lse[query][rows], _ = _softmax(q, k, query, kv, rows, scoring)
            kept = scoring.factors[query][rows] * weights
            out[query][rows] = _visible_sum(kept, visible, v[kv])
    return Result(out, lse)


def gradients(
    q: Query,
    k: Key,
    v: Value,
    dout: Out,
    *,
    causal: bool = False,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    factors: Factors | None = None,
    sinks: Sinks | None = None,
    dlse: Float[Any, "B H Lq"] | None = None,
) -> Gradients:
    """Return the gradients of Σ dout · out + Σ dlse · lse with respect to q, k and v, in float64.

    The arguments are those of `attention`. Without `dlse` the loss does not depend on lse.

    Raises: ShapeError for axes that do not fit; DtypeError for a mask that is not boolean.

    >>> from ringlab.oracle import gradients
    >>> one = [[[[1.0]]]]  # a single key has weight 1 whatever its score: only v has a gradient
    >>> [float(gradient.squeeze()) for gradient in gradients(one, one, one, dout=[[[[5.0]]]])]
    [0.0, 0.0, 5.0]
    """
    q, k, v = _checked(q, k, v)
    scoring = _resolved(q, k, causal, mask, scale, softcap, factors, sinks)
    dout = _same_shape("dout", float64(dout), (*q.shape[:-1], v.shape[-1]))
    dlse = np.zeros(q.shape[:-1]) if dlse is None else _same_shape("dlse", float64(dlse), q.shape[:-1])
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    with np.errstate(all="ignore"):
        for query, kv, rows in _pieces(q, k):
            weights, visible, _, slope = _softmax(q, k, query, kv, rows, scoring)
            cotangent, kept = dout[query][rows], scoring.factors[query][rows]
            dscores = _dscores(weights, visible, kept * (cotangent @ v[kv].T), dlse[query][rows])
            dscores = np.where(visible, slope * dscores, 0.0)
            dq[query][rows] = scoring.scale * _visible_sum(dscores, visible, k[kv])
            dk[kv] += scoring.scale * _visible_sum(dscores.T, visible.T, q[query][rows])
            dv[kv] += _visible_sum((kept * weights).T, visible.T, cotangent)
    return Gradients(dq, dk, dv)


def _pieces(q: np.ndarray, k: np.ndarray) -> Iterator[tuple[tuple[int, int], tuple[int, int], slice]]:
    """Yield (batch, query head), (batch, kv head) and a slice of query rows, small enough for a tile."""
    group = q.shape[1] // k.shape[1]
    rows = max(1, TILE_ELEMENTS // max(1, k.shape[2]))
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for start in range(0, q.shape[2], rows):
                yield (b, h), (b, h // group), slice(start, min(start + rows, q.shape[2]))


def _softmax(
    q: np.ndarray,
    k: np.ndarray,
    query: tuple[int, int],
    kv: tuple[int, int],
    rows: slice,
    scoring: _Scoring,
) -> tuple[Matrix, Visible, Column, Matrix | float]:
    """Return (weights, visible pairs, lse, slope of the soft cap) for some query rows of one head.

    query, kv: (batch, query head) and (batch, key/value head). Without a cap the slope is 1.
    """
    visible = scoring.mask[query][rows]
    if scoring.causal:
        visible = visible & (np.arange(k.shape[2]) <= np.arange(rows.start, rows.stop)[:, None])
    scores, slope = scoring.scale * (q[query][rows] @ k[kv].T), 1.0
    if scoring.softcap is not None:
        part = np.tanh(scores / scoring.softcap)
        scores, slope = scoring.softcap * part, 1 - part**2
    scores = np.where(visible, scores, -np.inf)
    sink = scoring.sinks[query[1]]
    top = scores.max(-1, initial=sink)
    top = np.where(np.isfinite(top), top, 0.0)  # −inf − −inf would be NaN in rows that see no key
    powers = np.exp(scores - top[:, None])
    total = powers.sum(-1) + np.exp(sink - top)
    weights = np.where(visible, powers / total[:, None], 0.0)
    return weights, visible, np.log(total) + top, slope


def _dscores(weights: Matrix, visible: Visible, dweights: Matrix, dlse: Column) -> Matrix:
    """Return dS. delta is computed as Σ_j p_ij (dO_i·v_j), so a row that sees only one key gets exactly 0."""
    delta = np.where(visible, weights * dweights, 0.0).sum(-1)
    return np.where(visible, weights * (dweights - (delta - dlse)[:, None]), 0.0)


def _visible_sum(weights: Matrix, visible: Visible, values: Vectors) -> Float64[np.ndarray, "rows D"]:
    """Return weights @ values, where only visible pairs contribute to the sum."""
    finite = np.isfinite(values).all(-1)
    total = weights @ np.where(finite[:, None], values, 0.0)
    for column in np.flatnonzero(~finite):
        total += np.where(visible[:, column, None], weights[:, column, None] * values[column], 0.0)
    return total


def float64(array: Any) -> np.ndarray:
    """Return a torch tensor of any dtype and device, or anything array-like, as a float64 array.

    >>> float64([1, 2])
    array([1., 2.])
    """
    if hasattr(array, "detach"):  # a torch tensor; bfloat16 has no NumPy dtype, so torch widens it
        array = array.detach().cpu().double().numpy()
    return np.asarray(array, dtype=np.float64)


def _resolved(
    q: np.ndarray,
    k: np.ndarray,
    causal: bool,
    mask: Any,
    scale: float | None,
    softcap: float | None,
    factors: Any,
    sinks: Any,
) -> _Scoring:
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else float(scale)
    H = q.shape[1]
    sinks = np.full(H, -np.inf) if sinks is None else _same_shape("sinks", float64(sinks), (H,))
    return _Scoring(causal, _mask(mask, q, k), scale, softcap, _factors(factors, q, k), sinks)


def _checked(q: Any, k: Any, v: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = float64(q), float64(k), float64(v)
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ShapeError(
                f"{name} with 4 axes (batch, heads, tokens, head dim)",
                f"{array.ndim} axes, shape {array.shape}",
                f"add the missing axes, as in {name}[None, None] for one batch and one head",
            )
    _same_shape("v", v, (*k.shape[:-1], v.shape[-1]))
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ShapeError(
            "q and k with the same batch (axis 0) and head dim (axis 3)",
            f"q {q.shape}, k {k.shape}",
            "only heads and tokens may differ; transpose if they are on other axes",
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(
            "query heads H divisible by key/value heads K",
            f"H = {q.shape[1]}, K = {k.shape[1]}",
            "each key/value head serves H // K query heads",
        )
    return q, k, v


def _same_shape(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape != shape:
        like = {"v": "k", "dout": "out", "dlse": "lse"}.get(name)
        needed = f"{name} in the shape of {like}, {shape}" if like else f"{name} of shape {shape}"
        raise ShapeError(needed, f"{array.shape}")
    return array


def _mask(mask: Any, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return a view of `mask` in the shape (B, H, Lq, Lk). None means True everywhere."""
    shape = (*q.shape[:3], k.shape[2])
    if mask is None:
        return np.broadcast_to(True, shape)
    mask = np.asarray(mask.detach().cpu() if hasattr(mask, "detach") else mask)
    if mask.dtype != np.bool_:
        raise DtypeError(
            "a boolean mask, True where a query may see a key",
            f"dtype {mask.dtype}",
            "for an additive mask of 0 and −inf, pass mask == 0",
        )
    try:
        return np.broadcast_to(mask, shape)
    except ValueError:
        raise ShapeError(
            f"a mask that broadcasts to (B, H, Lq, Lk) = {shape}",
            f"shape {mask.shape}",
            "make the last two axes (Lq, Lk); a mask for each batch has shape (B, 1, Lq, Lk)",
        ) from None


def _factors(factors: Any, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return a view of `factors` in the shape (B, H, Lq, Lk). None means 1 everywhere."""
    shape = (*q.shape[:3], k.shape[2])
    given = float64(1.0 if factors is None else factors)
    try:
        return np.broadcast_to(given, shape)
    except ValueError:
        raise ShapeError(f"factors that broadcast to (B, H, Lq, Lk) = {shape}", f"{given.shape}") from None
