"""Exercise 10: relative error and fold as they should be, and the common mistakes made with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringlab.course.contract import Misconception

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
    Misconception(
        "broadcasts",
        "x has another shape than the truth, and broadcasting compared it all the same. Another shape is no result: inf.",
        _broadcast,
    ),
    Misconception(
        "no_scale",
        "Your error is absolute: it depends on the unit of the numbers, so that small numbers are always right and large ones "
        "never. Divide by the size of the truth.",
        lambda x, truth: float((x.double() - truth).norm()),
    ),
    Misconception(
        "largest_without_scale",
        "You return the largest absolute difference: what atol looks at. It says nothing until it is set against the "
        "size of the truth; and the norm asked for counts all entries.",
        lambda x, truth: float((x.double() - truth).abs().max()),
    ),
    Misconception(
        "zero_truth",
        "Where the truth is all 0 there is nothing to divide by: the answer asked for is then the norm of x.",
        lambda x, truth: _plain(x, truth) if truth.any() else math.inf if x.any() else 0.0,
    ),
    Misconception(
        "zero_truth_is_inf",
        "Where the truth is all 0 you return inf, even for a result that is all 0 as well: the answer asked for is the norm of x.",
        lambda x, truth: _plain(x, truth) if truth.any() else math.inf,
    ),
    Misconception(
        "divides_by_entries",
        "You divide entry by entry: one entry whose truth is 0 makes the whole error infinite. Divide norm by norm.",
        _entries,
    ),
    Misconception(
        "signed",
        "Differences of opposite sign cancel in your sum. An error has no sign: take norms.",
        lambda x, truth: float((x.double() - truth).sum().abs() / truth.sum().abs()),
    ),
    Misconception(
        "by_own_size",
        "You divide by the norm of x. A result that is far too large then looks harmless, as its error never exceeds "
        "about 1. The yardstick is the truth.",
        lambda x, truth: float((x.double() - truth).norm() / x.double().norm()),
    ),
    Misconception(
        "entry_by_entry",
        "You divide entry by entry and take the worst. An entry whose truth is near 0 has a huge relative error in every "
        "right result too. Divide norm by norm.",
        _elementwise,
    ),
    Misconception(
        "mean_of_entries",
        "You average relative errors of single entries: those whose truth is near 0 decide. Divide norm by norm.",
        _mean_elementwise,
    ),
    Misconception(
        "largest_by_largest",
        "This is the largest difference over the largest entry: a sound measure, but another one. Asked for is "
        "the norm of the difference over the norm of the truth.",
        _by_largest,
    ),
    Misconception(
        "in_the_narrow_dtype",
        "The truth was rounded to the dtype of x before the comparison, so what x lost by rounding goes unseen. Widen x to "
        "float64 instead; never narrow the truth.",
        _narrow,
    ),
    Misconception(
        "drops_what_is_not_finite",
        "Entries that are NaN or infinite were left out of the comparison. A NaN is the worst of errors: return inf. Only "
        "an infinity that the truth has as well, at the same place, is right.",
        _without_nan,
    ),
    Misconception(
        "nan_is_no_number",
        "Your error came out as NaN. Every comparison with NaN is false: `error > bound` would call it right. Say inf, or "
        "0 for what is equal, before the difference is taken.",
    ),
    Misconception(
        "infinities_subtract",
        "Where x and the truth are the same infinity nothing is wrong, but their difference is NaN. Settle equal entries "
        "before you subtract.",
        _infinities,
    ),
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


FOLD = (
    Misconception(
        "forgets_the_state",
        "The state that came in is gone: the parts were folded from nothing. Start from (out, lse).",
        _forgetful,
    ),
    Misconception(
        "averages_parts",
        "You average the outputs. A part's weight is e^(its lse - the common lse).",
        _average,
    ),
    Misconception(
        "out_not_rescaled",
        "What out held before a part came keeps its full weight: multiply it by e^(old lse - new lse).",
        _by(_not_rescaled),
    ),
    Misconception(
        "skips_the_last",
        "The last part is missing from the result.",
        lambda out, lse, outs, lses: fold(out, lse, outs[:-1], lses[:-1]),
    ),
    Misconception(
        "lse_is_the_largest",
        "Your lse is the largest that came by, not the logarithm of the sum: later parts then weigh too much. Use logaddexp.",
        _by(_maximum),
    ),
    Misconception(
        "nan_for_nothing",
        "A row that has seen no key became NaN: -inf - (-inf) has no value. Nothing merged with nothing is (0, -inf).",
        _by(_unsafe),
    ),
    Misconception(
        "masses",
        "e^lse itself overflows above 88 and vanishes below -104. Only differences of lse may stand in an exponent.",
        _by(_masses),
    ),
    Misconception(
        "state_follows_the_parts",
        "Your out is only as exact as bfloat16: the state was rounded to the parts' dtype at every merge, and the error grows "
        "with their number. Convert each part to float32; keep the state there.",
    ),
    Misconception(
        "lse_follows_the_parts",
        "Your lse is only as exact as bfloat16. An error of lse is an error of a whole weight: it stays float32, whatever "
        "the dtype of the parts.",
    ),
    Misconception(
        "rounds_at_the_end",
        "The values are right to the last rounding, but the state came back in the parts' dtype. It is a state: the next parts are "
        "folded into it. Only who needs the finished result rounds it.",
    ),
    Misconception(
        "sorts_the_parts",
        "You bring the parts into an order of your own. Folding them in two batches then gives other bits than folding them at "
        "once, and who repeats a run elsewhere cannot get its bits. Take them as they come.",
    ),
    Misconception(
        "wider_inside",
        "You fold in float64 and round once at the end. That is more exact, but the state between two batches is float32: there it "
        "is rounded, and inside a batch it is not, so two batches give other bits than one. Keep the state float32 throughout.",
    ),
    Misconception(
        "not_resumable",
        "Values are right, but two batches give other bits than one: the parts were weighed against an lse that only exists once all "
        "are there, or merged as a tree. Merge one part at a time into the state.",
    ),
)


def named(known: tuple[Misconception, ...], name: str, counterexample: str = "") -> Any:
    """Return the Failure of the misconception called `name`."""
    return next(mistake for mistake in known if mistake.name == name).failure(counterexample)
