r"""The largest allowed error, derived from the plainest implementation and never guessed.

The rule: on the same input, in the same dtype, an error against the float64 oracle may be at most twice that
of the plainest implementation (softmax(scale · q kᵀ) v with every tensor materialised in that dtype,
gradients by autograd). The error of the plainest implementation is the largest one over a few orders of
summing the keys, so that it does not depend on luck. In addition, there is a floor for inputs on which the
plainest implementation is exact.

The floor, where ε is the unit of last place at 1 of the dtype, and ε' that of the running state (float32, or
float64 for float64 inputs):

1. One unit of last place at the result's scale, ε · max |truth|, because the result has to be stored.
2. The effect of storing the state.
   Storing `out`: a backward pass gets out, lse and delta = Σ_d dO·out. If rounding moves each entry of out by
   at most ε/2 of itself, delta_i has a standard deviation below ε r_i / (2√3), where r_i = √(Σ_d (dO·out)²).
   The floor allows ε r_i, which is more than three standard deviations. A change of delta is a change of
   −dlse, so the oracle gives its effect on dq and dk.
   Storing lse: rounding moves it by at most ε'|lse_i|/2. This is the relative change of row i of p =
   e^(s−lse), and of a partial's weight in a merge. out_i has the same relative change, and the gradients
   change as if dO_i were scaled by it, so the oracle gives the change.
   Summing delta: the plainest implementation computes delta from the same dO·v_j from which it subtracts
   delta. So errors cancel if one key has all the weight: a rounding η_j of dO·v_j enters as η_j − Σ_l p_l
   η_l, and the dS of such a row is exactly 0. With a delta from a stored out, errors do not cancel: the
   rounding enters as η_j − η, where η comes from summing delta itself. The difference, Σ_l p_l η_l − η, is
   again a change of delta. Where p is 1, it consists of the roundings of two sums of D products (D is v's
   head dim). After d of the products, in any order, the mean square of a partial sum is d/D (1 − d/D) r² +
   (d/D)² delta². Over all d this adds up to D (r² + 2 delta²) / 6. Rounding a partial sum changes it by a
   relative standard deviation below ε'/(2√3), so the roundings of both sums have together a standard
   deviation below ε' √(D (r² + 2 delta²)) / 6. The floor allows ε' √(D (r² + 2 delta²) / 3), which is more
   than three standard deviations.
3. Scores. Summing D products q_d k_d moves a score by δ = ε' ρ √n / 4, where ρ = scale · max √(Σ_d (q_d
   k_d)²), and n = max(D, S) because rows are summed over S keys too. lse also moves by δ.
4. The oracle's own rounding, which matters only for float64 inputs. If the oracle and the plainest
   implementation round alike, their difference does not show the error, so the oracle's own rounding is
   added. With δ from part 3, p moves by at most 2δ of itself, out by 2δ max|v|, and dv by 2δ max|dO| c, where
   c is the largest sum of a column of p. dS moves by 4δ p |dO||v|, dq by that times scale |k|, and dk by that
   times scale |q| c.

If the whole truth is zero (S = 1: a single key leaves no gradient to q and k), only part 2 applies.

A gradient of lse, dlse, is subtracted from delta: dS = p (dP − delta + dlse). This subtraction rounds by at
most ε'|dlse|, which part 2 adds to the change of delta. Part 2 scales dlse with row i of p, and in part 4 it
adds 2δ p |dlse| to dS.

A sink's logit is stored and not summed, so it adds no rounding of a score. It makes p smaller, and all parts
scale with p.

A soft cap c limits scores to c and rounds them two more times, which adds ε' c to δ in part 3. It never
makes the rounding of a score larger, because its slope is at most 1. Under dropout with factors f, all terms
with p are multiplied by max f.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack

import numpy as np
import torch
from jaxtyping import Int64, Num
from torch import Tensor

from ringlab import oracle
from ringlab.mask import Mask
from ringlab.types import KeyValue, Out, Query, Value

NAMES = ("out", "lse", "dq", "dk", "dv")
FACTOR = 2.0
"""The largest allowed multiple of the plainest implementation's error."""
ORDERS = 4
"""The number of orders in which the plainest implementation sums the keys; its largest error counts."""


class Scoring(TypedDict, total=False):
    """The keywords about scores and weights that `truth`, `plainest`, `bounds` and `score_rounding` share.

    causal: whether query i sees only keys j ≤ i; False by default. mask: a mask of the whole sequence, or a
    boolean array that broadcasts to (B, H, Lq, Lk), which replaces `causal`.
    scale: D^−½ by default. softcap, factors and sinks: as in `ringlab.oracle`; factors broadcast to (B, H,
    Lq, Lk).
    """

    causal: bool
    mask: Mask | np.ndarray | None
    scale: float | None
    softcap: float | None
    factors: np.ndarray | None
    sinks: np.ndarray | None


RowGradient: TypeAlias = Num[np.ndarray, "B H Lq"]
OracleOptions: TypeAlias = dict[str, Any]
"""A `Scoring` as keyword arguments of the oracle, whose mask is an array."""


class Results(NamedTuple):
    """All results of an attention, forward and backward: torch tensors, or float64 arrays for the truth."""

    out: Any
    lse: Any
    dq: Any
    dk: Any
    dv: Any


def truth(
    q: Query,
    k: KeyValue,
    v: Value,
    dout: Out,
    *,
    dlse: RowGradient | None = None,
    **scoring: Unpack[Scoring],
) -> Results:
    """Return the oracle's results in float64; the inputs must already be rounded to their dtype.

    dlse: the gradient of lse, (B, H, Lq).
    """
    options = _oracle_options(q, k, **scoring)
    out, lse = oracle.attention(q, k, v, **options)
    return Results(out, lse, *oracle.gradients(q, k, v, dout, dlse=dlse, **options))


def plainest(
    q: Query,
    k: KeyValue,
    v: Value,
    dout: Out,
    *,
    order: Int64[Tensor, " Lk"] | None = None,
    dlse: RowGradient | None = None,
    **scoring: Unpack[Scoring],
) -> Results:
    """Return softmax(scale · q kᵀ) v, its lse and autograd's gradients, all materialised in q's dtype.

    Only the sum in lse is in the state's dtype (at least float32), as everywhere in ringlab.
    order: the permutation of the keys in which they are summed.
    """
    options = _oracle_options(q, k, **scoring)
    order = torch.arange(k.shape[-2], device=k.device) if order is None else order
    leaves = [q, k[..., order, :], v[..., order, :]]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    with torch.enable_grad():
        scores = _scores(leaves[0], leaves[1], order, options)
        if options["sinks"] is not None:
            sinks = torch.from_numpy(options["sinks"]).to(scores)[:, None, None]
            scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        weights = scores.softmax(-1)[..., : len(order)]
        if options["factors"] is not None:
            weights = weights * torch.from_numpy(options["factors"]).to(q)[..., order]
        out = weights @ _for_each_query_head(leaves[2], q.shape[1])
        lse = scores.to(_state_dtype(q.dtype)).logsumexp(-1)
    results, cotangents = (
        (out, lse),
        (dout, torch.zeros_like(lse) if dlse is None else torch.from_numpy(dlse).to(lse)),
    )
    dq, dk, dv = torch.autograd.grad(results, leaves, cotangents)
    back = torch.argsort(order)
    return Results(out.detach(), lse.detach(), dq, dk[..., back, :], dv[..., back, :])


def relative_error(x: Num[Tensor | np.ndarray, "..."], truth: Num[np.ndarray, "..."]) -> float:
    """Return max |x − truth| / max |truth| over all entries; max |x| if truth is all zero.

    Equal infinities count as no error; a NaN, or an infinity in only one of the arrays, counts as inf. The
    scale max |truth| is taken over finite entries.
    """
    x = oracle.float64(x)
    if x.shape != truth.shape:
        return float("inf")
    finite = np.isfinite(truth)
    if not np.array_equal(x[~finite], truth[~finite]) or not np.isfinite(x[finite]).all():
        return float("inf")
    difference = np.abs(x[finite] - truth[finite]).max(initial=0.0)
    return float(difference / _scale_of(truth))


def bounds(
    q: Query,
    k: KeyValue,
    v: Value,
    dout: Out,
    *,
    true: Results | None = None,
    dlse: RowGradient | None = None,
    **scoring: Unpack[Scoring],
) -> dict[str, float]:
    """Return the largest allowed `relative_error` of out, lse, dq, dk and dv on these inputs.

    true: the result of `truth` for the same arguments, if the caller already has it.
    """
    true = true or truth(q, k, v, dout, dlse=dlse, **scoring)
    plain = _errors_of_the_plainest(q, k, v, dout, true, dlse, scoring)
    floors = _floors(q, k, v, dout, true, dlse, _oracle_options(q, k, **scoring))
    return {name: FACTOR * plain[name] + floors[name] for name in NAMES}


def score_rounding(
    q: Query,
    k: KeyValue,
    v: Value,
    dout: Out,
    *,
    true: Results | None = None,
    dlse: RowGradient | None = None,
    **scoring: Unpack[Scoring],
) -> dict[str, float]:
    """Return the largest change of each result that part 3 of the floor (rounded scores) can cause.

    In backward an implementation may recompute scores that differ by a rounding from the scores of its stored
    lse. On scores of some hundreds this difference is larger than the error of the plainest implementation,
    which normalises the same scores that it computed.
    true: as in `bounds`.
    """
    true = true or truth(q, k, v, dout, dlse=dlse, **scoring)
    moves = _score_moves(q, k, v, dout, dlse, _oracle_options(q, k, **scoring))
    return {name: moves[name] / _scale_of(getattr(true, name)) for name in NAMES}


def errors(results: Results, true: Results) -> dict[str, float]:
    """Return the `relative_error` of out, lse, dq, dk and dv."""
    return {name: relative_error(getattr(results, name), getattr(true, name)) for name in NAMES}


def _oracle_options(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    mask: Mask | np.ndarray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    factors: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> OracleOptions:
    options: OracleOptions = {"scale": scale, "softcap": softcap, "factors": factors, "sinks": sinks}
    if mask is None:
        return options | {"causal": causal}
    if isinstance(mask, np.ndarray):
        return options | {"mask": mask}
    visible = mask.of_length(k.shape[-2]).visible(np.arange(q.shape[-2]), np.arange(k.shape[-2]))
    return options | {"mask": visible}


def _errors_of_the_plainest(
    q: Query, k: KeyValue, v: Value, dout: Out, true: Results, dlse: RowGradient | None, scoring: Scoring
) -> dict[str, float]:
    """Return the largest errors of the plainest implementation over a few orders of the keys."""
    largest = dict.fromkeys(NAMES, 0.0)
    generator = torch.Generator().manual_seed(0)
    for turn in range(ORDERS):
        length = k.shape[-2]
        order = torch.randperm(length, generator=generator) if turn else torch.arange(length)
        plain = plainest(q, k, v, dout, **scoring, dlse=dlse, order=order.to(k.device))
        largest = {name: max(largest[name], error) for name, error in errors(plain, true).items()}
    return largest


def _floors(
    q: Query,
    k: KeyValue,
    v: Value,
    dout: Out,
    true: Results,
    dlse: RowGradient | None,
    options: OracleOptions,
) -> dict[str, float]:
    """Return the floor of the module's docstring as relative errors."""
    unit, state = _unit(q.dtype), _state_unit(q.dtype)
    moves = _storing(q, k, v, dout, true, dlse, options)
    rounding = _score_moves(q, k, v, dout, dlse, options)
    moves["lse"] += rounding["lse"]
    if q.dtype == torch.float64:
        moves = {name: moves[name] + rounding[name] for name in NAMES}
    stored = {name: state if name == "lse" else unit for name in NAMES}
    zero = {name: _largest(getattr(true, name)) == 0 for name in NAMES}
    return {
        name: (0.0 if zero[name] else stored[name]) + moves[name] / _scale_of(getattr(true, name))
        for name in NAMES
    }


def _storing(
    q: Query,
    k: KeyValue,
    v: Value,
    dout: Out,
    true: Results,
    dlse: RowGradient | None,
    options: OracleOptions,
) -> dict[str, float]:
    """Return part 2: the change of the results by storing out and lse, and by summing delta from them."""
    unit, state = _unit(q.dtype), _state_unit(q.dtype)
    cotangent, nothing = oracle.float64(dout), np.zeros(true.out.shape)
    products = cotangent * true.out
    squares, delta = (products**2).sum(-1), products.sum(-1)
    change = unit * np.sqrt(squares) + state * np.sqrt(v.shape[-1] * (squares + 2 * delta**2) / 3)
    change += 0.0 if dlse is None else state * np.abs(dlse)
    of_out = oracle.gradients(q, k, v, nothing, dlse=change, **options)
    relative = np.where(np.isfinite(true.lse), state / 2 * np.abs(true.lse), 0.0)[..., None]
    scaled = None if dlse is None else dlse * relative[..., 0]
    of_lse = oracle.gradients(q, k, v, cotangent * relative, dlse=scaled, **options)
    return {
        "out": _largest(true.out * relative),
        "lse": 0.0,
        "dq": _largest(of_out.dq) + _largest(of_lse.dq),
        "dk": _largest(of_out.dk) + _largest(of_lse.dk),
        "dv": _largest(of_lse.dv),
    }


def _score_moves(
    q: Query, k: KeyValue, v: Value, dout: Out, dlse: RowGradient | None, options: OracleOptions
) -> dict[str, float]:
    """Return parts 3 and 4: the change of each result by rounding the scores in the state's dtype."""
    D, S = q.shape[-1], max(q.shape[-2], k.shape[-2])
    scale = D**-0.5 if options["scale"] is None else abs(options["scale"])
    ones = np.ones((*q.shape[:-1], v.shape[-1]))
    column = _largest(oracle.gradients(q, k, v, ones, **options | {"factors": None}).dv)
    rho = scale * float(np.linalg.norm(_each_largest(q) * _each_largest(k)))
    delta = _state_unit(q.dtype) * (rho * max(D, S) ** 0.5 / 4 + (options["softcap"] or 0.0))
    most = 1.0 if options["factors"] is None else _largest(options["factors"])
    products = most * _longest(dout) * _longest(v) + (0.0 if dlse is None else _largest(dlse) / 2)
    return {
        "out": 2 * delta * most * _largest(v),
        "lse": delta,
        "dq": 4 * delta * products * scale * _longest(k),
        "dk": 4 * delta * products * scale * _longest(q) * column,
        "dv": 2 * delta * most * _largest(dout) * column,
    }


def _scores(q: Tensor, k: Tensor, order: Tensor, options: OracleOptions) -> Tensor:
    """Return the scores of all queries with the keys in this order; −inf for keys not seen."""
    scale = q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    scores = q @ _for_each_query_head(k, q.shape[1]).mT * scale
    if options["softcap"] is not None:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if options.get("causal"):
        scores = scores.masked_fill(order > torch.arange(q.shape[-2], device=q.device)[:, None], -torch.inf)
    if options.get("mask") is not None:
        visible = torch.from_numpy(options["mask"]).to(q.device)
        scores = scores.masked_fill(~visible[..., order], -torch.inf)
    return scores


def _for_each_query_head(kv: Tensor, heads: int) -> Tensor:
    return kv.repeat_interleave(heads // kv.shape[1], dim=1)


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _state_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _state_unit(dtype: torch.dtype) -> float:
    return _unit(_state_dtype(dtype))


def _scale_of(truth: np.ndarray) -> float:
    return _largest(truth[np.isfinite(truth)]) or 1.0


def _largest(x: Tensor | np.ndarray) -> float:
    return float(np.abs(oracle.float64(x)).max(initial=0.0))


def _each_largest(x: Tensor) -> np.ndarray:
    """Return the largest absolute entry of each head dim."""
    return np.abs(oracle.float64(x)).max(axis=(0, 1, 2), initial=0.0)


def _longest(x: Tensor) -> float:
    """Return the norm of the longest row vector."""
    return float(np.linalg.norm(oracle.float64(x), axis=-1).max(initial=0.0))
