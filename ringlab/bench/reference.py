"""Checks a kernel at the size at which it is timed: compares its results on a sample of tokens with float64.

The oracle would need the whole S×S matrix of scores, which does not fit into memory at this size. Here lse
and delta of all rows are computed in float64, a few rows at a time. Then out, lse and dq of any rows, and dk
and dv of any keys, can be computed from them. The same function in the dtype of the inputs is the plain
implementation, whose error sets the bound. The largest allowed error of a row is a sum: twice the error of the plain
implementation in its worst row, a unit of last place for storing the result, and the effect of a rounded `out` on
delta (see part 2 of ringlab.conformance.tolerance).

The check finds errors that occur at full size, such as rows and keys that are not visited, wrong masks,
strides and indices that overflow, or a lost rescaling. One missing key among 16k changes `out` by less than
its rounding, and is visible only in dk and dv. The case table at small sizes finds such errors in forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ringlab.bench.problem import Inputs

FACTOR = 2.0
"""The allowed error as a multiple of the plainest implementation's, as in ringlab.conformance.tolerance."""
ROW_BYTES = 2**29
"""Bytes of float64 scores held at once while lse and delta are computed."""
EDGES = (64, 128, 256, 512)
"""Every sample has the rows at these numbers and just before them: tiles begin and end there."""

Results = Mapping[str, Tensor]
"""Any of out, dq, dk, dv (1, H, S, D) and lse (1, H, S), by name."""


@dataclass(frozen=True)
class Reference:
    """The true results at `tokens`, and the largest allowed error of each of their rows, (H, tokens)."""

    tokens: Tensor
    true: dict[str, Tensor]
    bounds: dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """The error of a kernel's worst row and the largest error / bound, by result.

    refusal: the fault, or empty.
    """

    errors: dict[str, float]
    of_bounds: dict[str, float]
    refusal: str | None


def sample(S: int, generator: torch.Generator, count: int = 48) -> Tensor:
    """Return token numbers: both ends, both sides of tile edges, and up to `count` at random."""
    chosen = {*range(8), *range(S - 8, S), *EDGES, *(edge - 1 for edge in EDGES)}
    chosen |= set(torch.randint(S, (count,), generator=generator, device=generator.device).tolist())
    return torch.tensor(sorted(token for token in chosen if 0 <= token < S))


def reference(inputs: Inputs, causal: bool, tokens: Int[Tensor, " tokens"]) -> Reference:
    """Return the true results at `tokens` in float64, and the error bounds for the inputs' dtype."""
    tokens = tokens.to(inputs.q.device)
    lse, delta, spread = _of_all_rows(inputs, causal)
    true = at_tokens(inputs, tokens, lse, delta, causal, torch.float64)
    plain = at_tokens(inputs, tokens, lse, delta, causal, inputs.q.dtype)
    moves = _storing_out(inputs, tokens, lse, spread, causal)
    unit = torch.finfo(inputs.q.dtype).eps
    allowed = {}
    for name in true:
        stored = unit * (true["lse"].abs().clamp(min=1.0) if name == "lse" else torch.ones_like(true["lse"]))
        allowed[name] = FACTOR * errors(name, plain[name], true[name]).max() + stored
        if name in moves:
            allowed[name] += moves[name] / _lengths(true[name])
    return Reference(tokens, true, allowed)


def judge(results: Results, expected: Reference) -> Verdict:
    """Return the errors of `results`, and a refusal if rows are unwritten or their errors exceed a bound."""
    results = {name: tensor.detach() for name, tensor in results.items()}
    for name, tensor in results.items():
        rows = ~torch.isfinite(tensor if name == "lse" else tensor.sum(dim=-1, dtype=torch.float32))
        if count := int(rows.sum()):
            return Verdict({}, {}, f"{name}: {count} of {rows.numel()} rows not written, or not finite")
    found = {
        name: errors(name, tensor[0].index_select(1, expected.tokens), expected.true[name])
        for name, tensor in results.items()
    }
    of_bounds = {name: float((error / expected.bounds[name]).max()) for name, error in found.items()}
    worst = {name: float(error.max()) for name, error in found.items()}
    for name, ratio in of_bounds.items():
        if not ratio <= 1.0:
            refusal = f"{name}: a row's error is {ratio:.3g} times what is allowed; the largest is {worst[name]:.2e}"
            return Verdict(worst, of_bounds, refusal)
    return Verdict(worst, of_bounds, None)


def errors(name: str, x: Float[Tensor, "*shape"], true: Float[Tensor, "*shape"]) -> Float[Tensor, "..."]:
    """Return each row's error ‖x − true‖ / ‖true‖, or |x − true| for lse.

    A row is divided by at least the median of all rows' ‖true‖, so that tiny rows do not have huge errors.
    """
    difference = x.double() - true.double()
    return difference.abs() if name == "lse" else difference.norm(dim=-1) / _lengths(true)


def _lengths(true: Tensor) -> Tensor:
    lengths = true.double().norm(dim=-1)
    return lengths.clamp(min=float(lengths.median()))


def at_tokens(
    inputs: Inputs,
    tokens: Int[Tensor, " tokens"],
    lse: Float[Tensor, "H S"],
    delta: Float[Tensor, "H S"],
    causal: bool,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return out, lse and dq of the rows, dk and dv of the keys at `tokens`, every tensor in `dtype`.

    lse, delta: of all rows. Source of the gradients: arXiv 2205.14135, appendix B.
    """
    q, k, v, dout = (x[0].to(dtype) for x in inputs)
    scale, positions = q.shape[-1] ** -0.5, torch.arange(q.shape[1], device=q.device)
    rows = (q[:, tokens] @ k.mT) * scale
    if causal:
        rows = rows.masked_fill(positions > tokens[:, None], -math.inf)
    weights = rows.softmax(dim=-1)
    to_weights = dout[:, tokens] @ v.mT
    to_scores = weights * (to_weights - (weights * to_weights).sum(dim=-1, keepdim=True))
    found = {"out": weights @ v, "lse": _log_sum(rows), "dq": (to_scores @ k) * scale}
    columns = (q @ k[:, tokens].mT) * scale
    if causal:
        columns = columns.masked_fill(positions[:, None] < tokens, -math.inf)
    weights = (columns.to(lse.dtype) - lse[..., None]).exp().to(dtype)
    to_scores = weights * (dout @ v[:, tokens].mT - delta[..., None].to(dtype))
    return {**found, "dk": (to_scores.mT @ q) * scale, "dv": weights.mT @ dout}


def _of_all_rows(inputs: Inputs, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return lse, delta = rowsum(dout·out) and √rowsum((dout·out)²) of all rows, each (H, S), in float64."""
    q, k, v, dout = (x[0].double() for x in inputs)
    H, S, D = q.shape
    positions, count = torch.arange(S, device=q.device), max(1, ROW_BYTES // (8 * H * S))
    lse, delta, spread = (torch.empty(H, S, dtype=torch.float64, device=q.device) for _ in range(3))
    for start in range(0, S, count):
        rows = slice(start, start + count)
        scores = (q[:, rows] @ k.mT) * D**-0.5
        if causal:
            scores.masked_fill_(positions > positions[rows, None], -math.inf)
        lse[:, rows] = scores.logsumexp(dim=-1)
        products = dout[:, rows] * (scores.sub_(lse[:, rows, None]).exp_() @ v)
        delta[:, rows], spread[:, rows] = products.sum(dim=-1), products.norm(dim=-1)
    return lse, delta, spread


def _storing_out(
    inputs: Inputs, tokens: Tensor, lse: Tensor, spread: Tensor, causal: bool
) -> dict[str, Tensor]:
    """Return how much the rows of dq and dk at `tokens` change if delta is computed from a rounded out."""
    q, k = (x[0].double() for x in inputs[:2])
    scale, positions = q.shape[-1] ** -0.5, torch.arange(q.shape[1], device=q.device)
    state = torch.finfo(torch.promote_types(inputs.q.dtype, torch.float32)).eps
    # delta and dout·v are sums of D products, which each kernel adds in its own order. Part 2 of
    # ringlab.conformance.tolerance states how far they differ. delta is assumed to be as large as r, as it is
    # for normally distributed inputs.
    change = (torch.finfo(inputs.q.dtype).eps + state * q.shape[-1] ** 0.5) * spread
    rows = (q[:, tokens] @ k.mT * scale - lse[:, tokens, None]).exp()
    columns = (q @ k[:, tokens].mT * scale - lse[..., None]).exp()
    if causal:
        rows = rows.masked_fill(positions > tokens[:, None], 0.0)
        columns = columns.masked_fill(positions[:, None] < tokens, 0.0)
    dq = scale * change[:, tokens] * (rows @ k).norm(dim=-1)
    dk = scale * (columns.mT @ (change[..., None] * q)).norm(dim=-1)
    return {"dq": dq, "dk": dk}


def _log_sum(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32)).logsumexp(dim=-1)
