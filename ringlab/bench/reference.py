"""Is a kernel right at the size it is timed at? Its results on a sample of tokens against float64.

The oracle would need the whole S×S scores. Here lse and delta of all rows are computed in float64, a
few rows at a time; from them follow out, lse and dq of any rows and dk and dv of any keys. The same
function in the inputs' own dtype is the yardstick: an error may be twice that of this plainest
implementation, and a unit of last place more, for the result has to be stored.

This finds what goes wrong at full size: rows and keys not visited, masks, strides and indices that
overflow, a lost rescaling. One key too few among 16k moves `out` by less than its rounding and shows
in dk and dv only; the case table at small sizes is what sees such things in forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ringlab.bench.problem import Inputs

FACTOR = 2.0
"""How many times the plainest implementation's error is allowed, as in ringlab.conformance.tolerance."""
ROW_BYTES = 2**29
"""Float64 scores that exist at once while lse and delta are computed."""
EDGES = (64, 128, 256, 512)
"""Rows at these and just before them are in every sample: tiles begin and end there."""

Results = Mapping[str, Tensor]
"""Any of out, dq, dk, dv (1, H, S, D) and lse (1, H, S)."""


@dataclass(frozen=True)
class Reference:
    """True results at `tokens`, and the largest errors allowed there."""

    tokens: Tensor
    true: dict[str, Tensor]
    bounds: dict[str, float]


@dataclass(frozen=True)
class Verdict:
    """A kernel's errors beside their bounds; `refusal` says what is wrong, None if nothing is."""

    errors: dict[str, float]
    refusal: str | None


def sample(S: int, generator: torch.Generator, count: int = 48) -> Tensor:
    """Return token numbers: both ends, both sides of tile edges, and up to `count` at random."""
    chosen = {*range(8), *range(S - 8, S), *EDGES, *(edge - 1 for edge in EDGES)}
    chosen |= set(torch.randint(S, (count,), generator=generator, device=generator.device).tolist())
    return torch.tensor(sorted(token for token in chosen if 0 <= token < S))


def reference(inputs: Inputs, causal: bool, tokens: Tensor) -> Reference:
    """Return the truth at `tokens` in float64, and the bounds that the inputs' own dtype implies."""
    tokens = tokens.to(inputs.q.device)
    lse, delta = _of_all_rows(inputs, causal)
    true = at_tokens(inputs, tokens, lse, delta, causal, torch.float64)
    plain = at_tokens(inputs, tokens, lse, delta, causal, inputs.q.dtype)
    unit = torch.finfo(inputs.q.dtype).eps
    allowed = {name: FACTOR * error(name, plain[name], true[name]) + unit for name in true}
    return Reference(tokens, true, allowed)


def judge(results: Results, expected: Reference) -> Verdict:
    """Return the errors of `results`, and why they are refused: rows not written, or beyond a bound."""
    results = {name: tensor.detach() for name, tensor in results.items()}
    for name, tensor in results.items():
        rows = ~torch.isfinite(tensor if name == "lse" else tensor.sum(dim=-1, dtype=torch.float32))
        if count := int(rows.sum()):
            return Verdict({}, f"{name}: {count} of {rows.numel()} rows not written, or not finite")
    errors = {
        name: error(name, tensor[0].index_select(1, expected.tokens), expected.true[name])
        for name, tensor in results.items()
    }
    for name, measured in errors.items():
        if not measured <= expected.bounds[name]:
            return Verdict(
                errors, f"{name}: error {measured:.2e}, at most {expected.bounds[name]:.2e} is allowed"
            )
    return Verdict(errors, None)


def error(name: str, x: Tensor, true: Tensor) -> float:
    """Return the worst row: ‖x − true‖ / ‖true‖, or of the median row where that is longer; lse as it is."""
    difference = x.double() - true.double()
    if name == "lse":
        return float(difference.abs().max())
    lengths = true.double().norm(dim=-1)
    return float((difference.norm(dim=-1) / lengths.clamp(min=float(lengths.median()))).max())


def at_tokens(
    inputs: Inputs, tokens: Tensor, lse: Tensor, delta: Tensor, causal: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return out, lse and dq of the rows, dk and dv of the keys at `tokens`, every tensor in `dtype`.

    lse and delta are those of all rows, (H, S). Source of the gradients: arXiv 2205.14135, appendix B.
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


def _of_all_rows(inputs: Inputs, causal: bool) -> tuple[Tensor, Tensor]:
    """lse and delta = rowsum(dout·out), (H, S), in float64."""
    q, k, v, dout = (x[0].double() for x in inputs)
    H, S, D = q.shape
    positions, count = torch.arange(S, device=q.device), max(1, ROW_BYTES // (8 * H * S))
    lse, delta = (torch.empty(H, S, dtype=torch.float64, device=q.device) for _ in range(2))
    for start in range(0, S, count):
        rows = slice(start, start + count)
        scores = (q[:, rows] @ k.mT) * D**-0.5
        if causal:
            scores.masked_fill_(positions > positions[rows, None], -math.inf)
        lse[:, rows] = scores.logsumexp(dim=-1)
        out = scores.sub_(lse[:, rows, None]).exp_() @ v
        delta[:, rows] = (dout[:, rows] * out).sum(dim=-1)
    return lse, delta


def _log_sum(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32)).logsumexp(dim=-1)
