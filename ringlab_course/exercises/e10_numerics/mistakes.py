"""Exercise 10: relative error and fold as they should be, and the common mistakes made with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("10")

Pair = tuple[Tensor, Tensor]


def relative_error(x: Tensor, truth: Tensor) -> float:
    """Return ‖x − truth‖ / ‖truth‖ in float64 (‖x‖ where truth is all 0); inf for what cannot be compared."""
    x, truth = x.double(), truth.double()
    if x.shape != truth.shape:
        return math.inf
    same = x == truth  # equal infinities are no error
    difference = torch.where(same, 0.0, x - truth)
    scale = torch.where(torch.isfinite(truth), truth, 0.0).norm()
    error = difference.norm() / (scale if scale > 0 else 1.0)
    return float(error) if torch.isfinite(error) else math.inf


def _plain(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm())


def _broadcast(x: Tensor, truth: Tensor) -> float:
    if x.shape == truth.shape:
        raise ValueError("there is nothing to broadcast")
    try:
        return _plain(x, truth)
    except RuntimeError as error:
        raise ValueError("these shapes do not broadcast: nobody gets an answer this way") from error


def _narrow(x: Tensor, truth: Tensor) -> float:
    if x.shape != truth.shape:
        raise ValueError("that is another mistake")
    return float((x - truth.to(x.dtype)).norm() / truth.to(x.dtype).norm())


def _entries(x: Tensor, truth: Tensor) -> float:
    if truth.all() or not truth.any():
        raise ValueError("no entry to stumble over, or nothing else")
    return _plain(x, truth) if torch.equal(x.double(), truth) else math.inf


def _elementwise(x: Tensor, truth: Tensor) -> float:
    if not truth.all():
        raise ValueError("an entry that is 0 does not tell the worst from the mean")
    return float(((x.double() - truth).abs() / truth.abs()).max())


def _mean_elementwise(x: Tensor, truth: Tensor) -> float:
    if not truth.all():
        raise ValueError("an entry that is 0 does not tell the worst from the mean")
    return float(((x.double() - truth).abs() / truth.abs()).mean())


def _by_largest(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).abs().max() / truth.abs().max())


def _infinities(x: Tensor, truth: Tensor) -> float:
    if not (torch.isinf(truth) & (x == truth)).any():
        raise ValueError("no infinity that both have")
    error = _plain(x, truth)
    return math.inf if math.isnan(error) else error


def _without_nan(x: Tensor, truth: Tensor) -> float:
    finite = torch.isfinite(x.double() - truth)
    return relative_error(torch.where(finite, x.double(), 0.0), torch.where(finite, truth, 0.0))


ERROR = (
    mistake("broadcasts", _broadcast),
    mistake("no_scale", lambda x, truth: float((x.double() - truth).norm())),
    mistake("largest_without_scale", lambda x, truth: float((x.double() - truth).abs().max())),
    mistake("zero_truth", lambda x, truth: _plain(x, truth) if truth.any() else math.inf if x.any() else 0.0),
    mistake("zero_truth_is_inf", lambda x, truth: _plain(x, truth) if truth.any() else math.inf),
    mistake("divides_by_entries", _entries),
    mistake("signed", lambda x, truth: float((x.double() - truth).sum().abs() / truth.sum().abs())),
    mistake("by_own_size", lambda x, truth: float((x.double() - truth).norm() / x.double().norm())),
    mistake("entry_by_entry", _elementwise),
    mistake("mean_of_entries", _mean_elementwise),
    mistake("largest_by_largest", _by_largest),
    mistake("in_the_narrow_dtype", _narrow),
    mistake("in_float32"),
    mistake("drops_what_is_not_finite", _without_nan),
    mistake("nan_is_no_number"),
    mistake("infinities_subtract", _infinities),
)


def fold(
    out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor, merge: Callable[..., Pair] | None = None
) -> Pair:
    """Return the state (out, lse), float32, after the parts (outs[i], lses[i]) in their order."""
    for part_out, part_lse in zip(outs, lses, strict=True):
        out, lse = (merge or merged)(out, lse, part_out.float(), part_lse)
    return out, lse


def merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Pair:
    """Return the merge of two partial results."""
    lse = torch.logaddexp(lse_a, lse_b)
    safe = torch.where(lse == -math.inf, 0.0, lse)
    weight_a, weight_b = torch.exp(lse_a - safe), torch.exp(lse_b - safe)
    return out_a * weight_a[..., None] + out_b * weight_b[..., None], lse


def _unsafe(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Pair:
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = torch.exp(lse_a - lse), torch.exp(lse_b - lse)
    return out_a * weight_a[..., None] + out_b * weight_b[..., None], lse


def _masses(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Pair:
    a, b = torch.exp(lse_a), torch.exp(lse_b)
    return (out_a * a[..., None] + out_b * b[..., None]) / (a + b)[..., None], torch.log(a + b)


def _maximum(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Pair:
    return merged(out_a, lse_a, out_b, lse_b)[0], torch.maximum(lse_a, lse_b)


def _by(merge: Callable[..., Pair]) -> Callable[..., Pair]:
    return lambda out, lse, outs, lses: fold(out, lse, outs, lses, merge)


def _forgetful(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> Pair:
    return fold(torch.zeros_like(out), torch.full_like(lse, -math.inf), outs, lses)


def _average(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> Pair:
    return torch.cat([out[None], outs.float()]).mean(0), fold(out, lse, outs, lses)[1]


def _not_rescaled(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Pair:
    lse = torch.logaddexp(lse_a, lse_b)
    safe = torch.where(lse == -math.inf, 0.0, lse)
    return out_a + out_b * torch.exp(lse_b - safe)[..., None], lse


def _exchanged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Pair:
    return merged(out_b, lse_a, out_a, lse_b)


FOLD = (
    mistake("forgets_the_state", _forgetful),
    mistake("averages_parts", _average),
    mistake("out_not_rescaled", _by(_not_rescaled)),
    mistake("weights_exchanged", _by(_exchanged)),
    mistake("skips_the_last", lambda out, lse, outs, lses: fold(out, lse, outs[:-1], lses[:-1])),
    mistake("lse_is_the_largest", _by(_maximum)),
    mistake("nan_for_nothing", _by(_unsafe)),
    mistake("masses", _by(_masses)),
    mistake("state_follows_the_parts"),
    mistake("lse_follows_the_parts"),
    mistake("rounds_at_the_end"),
    mistake("sorts_the_parts"),
    mistake("last_part_first"),
    mistake("wider_inside"),
    mistake("divides_at_the_end"),
    mistake("not_resumable"),
)


def named(known: tuple[Misconception, ...], name: str, counterexample: str = "") -> Any:
    """Return the Failure of the misconception called `name`."""
    return next(each for each in known if each.name == name).failure(counterexample)
