"""Checks of merges: correct merges of several styles pass for many seeds, and wrong merges are found."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from ringlab.conformance.kinds.merge import CHECKS, check_merge
from ringlab.errors import BackendError, ShapeError
from ringlab.merge import Partial, merge

Merged = tuple[Tensor, Tensor]


def in_one_go(outs: Tensor, lses: Tensor) -> Merged:
    state = lses.dtype
    top = lses.max(0).values
    weights = torch.exp(lses - top.masked_fill(top == -math.inf, 0.0)).unsqueeze(-1)
    total = weights.sum(0)
    values = (weights * outs.to(state)).sum(0) / torch.where(total == 0, 1.0, total)
    return values.to(outs.dtype), torch.logsumexp(lses, 0)


def each_of(outs: Tensor, lses: Tensor) -> list[Partial]:
    parts = [Partial(out.to(lses.dtype), lse) for out, lse in zip(outs, lses, strict=True)]
    return [Partial.identity(outs[0]), *parts]


def in_pairs(outs: Tensor, lses: Tensor) -> Merged:
    parts = each_of(outs, lses)
    while len(parts) > 1:
        parts = [reduce(merge, parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts[0].out.to(outs.dtype), parts[0].lse


def by_differences(outs: Tensor, lses: Tensor) -> Merged:
    """Merge as rings over flash-attn do: out − σ(new − lse) · (out − new)."""
    out, lse = (
        torch.zeros(outs[0].shape, dtype=lses.dtype),
        torch.full(lses[0].shape, -math.inf, dtype=lses.dtype),
    )
    for part, new in zip(outs.to(lses.dtype), lses, strict=True):
        share = torch.sigmoid(torch.where(new == -math.inf, -math.inf, new - lse)).unsqueeze(-1)
        out = torch.where(share == 0, out, torch.where(share == 1, part, out - share * (out - part)))
        lse = torch.logaddexp(lse, new)
    return out.to(outs.dtype), lse


def in_float64(outs: Tensor, lses: Tensor) -> Merged:
    out, lse = in_one_go(outs.double(), lses.double())
    return out.to(outs.dtype), lse.to(lses.dtype)


def shared(weights: Tensor, outs: Tensor) -> Tensor:
    return (weights.unsqueeze(-1) * outs).sum(0).to(outs.dtype)


def softmax(lses: Tensor) -> Tensor:
    return torch.nan_to_num(lses.softmax(0))


def in_place(outs: Tensor, lses: Tensor) -> Merged:
    found = in_one_go(outs, lses)
    lses -= lses.max(0).values
    return found


def sums_in_the_half_dtype(outs: Tensor, lses: Tensor) -> Tensor:
    weights = softmax(lses).to(outs.dtype).unsqueeze(-1)
    return reduce(torch.add, weights * outs)


def drops_weights_below(least: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outs, lses: shared(torch.where(softmax(lses) < least, 0.0, softmax(lses)), outs)


def dense(x: Tensor) -> Tensor:
    return torch.as_strided(x, x.shape, torch.empty(x.shape).stride())


def a_tree_with_even_levels(outs: Tensor, lses: Tensor) -> Merged:
    """Merge in pairs; a left-over partial joins the last pair on the first level, and is lost on later ones."""
    first, *parts = each_of(outs, lses)
    if len(parts) % 2:
        parts[-1] = merge(first if len(parts) == 1 else parts.pop(), parts[-1])
    while len(parts) > 1:
        parts = [merge(parts[i], parts[i + 1]) for i in range(0, len(parts) - 1, 2)]
    return parts[0].out.to(outs.dtype), parts[0].lse


def without_a_maximum(outs: Tensor, lses: Tensor) -> Tensor:
    return shared(torch.exp(lses) / torch.exp(lses).sum(0), outs)


def from_the_first(outs: Tensor, lses: Tensor) -> Tensor:
    weights = torch.exp(lses - lses[0])
    return shared(weights / weights.sum(0), outs)


def broken_lse_left_out(outs: Tensor, lses: Tensor) -> Merged:
    return in_one_go(outs, torch.where(lses.isfinite(), lses, -math.inf))


def refuses_nan(outs: Tensor, lses: Tensor) -> Merged:
    if not outs.isfinite().all() or not lses.lt(math.inf).all():
        raise ValueError("a partial is not finite")
    return in_one_go(outs, lses)


RIGHT = (in_one_go, in_pairs, by_differences, in_float64, refuses_nan)


WRONG: dict[str, tuple[str, str, Callable[[Tensor, Tensor], Any]]] = {
    "the mean of the ranks": ("values", "out is", lambda outs, lses: outs.mean(0)),
    "base 2 taken for e (sglang 40903)": ("values", "out is", lambda outs, lses: shared(softmax(lses * math.log(2)), outs)),
    "a tree loses a partial of six": ("values", "P=6", a_tree_with_even_levels),
    "changes lse in place": ("values", "changed in place", in_place),
    "lse as an array": ("values", "ndarray", lambda outs, lses: (in_one_go(outs, lses)[0], lses[0].numpy())),
    "sums in the half dtype": ("dtypes", "out is", sums_in_the_half_dtype),
    "an empty first rank is NaN": ("empty ranks", "nan", from_the_first),
    "a blind row is NaN": ("blind rows", "nan", lambda outs, lses: shared(lses.softmax(0), outs)),
    "a small number for −∞": ("unwritten", "out is", lambda outs, lses: shared(softmax(lses.clamp(min=-60.0)), outs)),
    "no maximum": ("large lse", "nan", without_a_maximum),
    "weights below 1e-4 are dropped": ("small weights", "out is", drops_weights_below(1e-4)),
    "a NaN becomes 0": ("NaN", "despite NaN in out", lambda outs, lses: in_one_go(outs, lses)[0].nan_to_num()),
    "an overflow becomes the largest number": ("NaN", "despite ∞ in out", lambda outs, lses: in_one_go(outs.clamp(-65504.0, 65504.0), lses)[0]),
    "a broken lse counts as no key": ("NaN", "despite NaN in lse", broken_lse_left_out),
    "outs read as if dense": ("strided", "out is", lambda outs, lses: shared(softmax(lses), dense(outs))),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("right", RIGHT)
def test_a_right_merge_passes(right: Callable[..., Any], seed: int) -> None:
    report = check_merge(right, seed=seed)
    assert report.ok and len(report.findings) == 1 + len(CHECKS), [each.evidence for each in report.findings]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_merge_falls_to_its_check(name: str) -> None:
    check, word, wrong = WRONG[name]
    evidence = {each.name: each.evidence for each in check_merge(wrong).findings if not each.ok}
    assert word in evidence[check], evidence


def test_every_check_has_its_wrong_merge() -> None:
    assert {check for check, _, _ in WRONG.values()} == {*CHECKS}


def test_base_2() -> None:
    def base_2(outs: Tensor, lses: Tensor) -> Merged:
        out, lse = in_one_go(outs, lses * math.log(2))
        return out, lse / math.log(2)

    assert check_merge(base_2, base=2).ok
    assert "values" in check_merge(base_2).failed and "values" in check_merge(in_one_go, base=2).failed


def test_what_is_no_attention_says_so() -> None:
    def raises(outs: Tensor, lses: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    assert "RuntimeError: no such kernel" in check_merge(raises, only=["values"]).findings[1].evidence
    assert "is NoneType" in check_merge(lambda outs, lses: None, only=["values"]).findings[1].evidence
    assert "is tuple" in check_merge(lambda outs, lses: (), only=["values"]).findings[1].evidence
    assert check_merge(lambda o, s: (in_one_go(o, s)[0], None)).ok
    assert "lse is to be" in check_merge(lambda o, s: (o[0], o[0]), only=["values"]).findings[1].evidence

    def of_the_project(outs: Tensor, lses: Tensor) -> Tensor:
        raise ShapeError("two partials", "three")

    assert "raised ShapeError" in check_merge(of_the_project, only=["values"]).findings[1].evidence
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (in_one_go, {"only": ["no check"]}), (3, {}), ("no_colon", {}), ("no_such_module:f", {}),
        (in_one_go, {"base": 1}), (in_one_go, {"base": math.inf}),
    ]  # fmt: skip
    for target, options in wrong:
        with pytest.raises(BackendError):
            check_merge(target, **options)
