"""Merges of partials: right ones of several styles pass for many seeds, wrong ones fall to the check that they name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from ringlab.conformance.merging import CHECKS, Case, check_merge, partials
from ringlab.errors import BackendError
from ringlab.merge import Partial, merge

Merged = tuple[Tensor, Tensor]


def in_one_go(outs: Tensor, lses: Tensor) -> Merged:
    state = lses.dtype
    top = lses.max(0).values
    weights = torch.exp(lses - top.masked_fill(top == -math.inf, 0.0)).unsqueeze(-1)
    total = weights.sum(0)
    values = (weights * outs.to(state)).sum(0) / torch.where(total == 0, 1.0, total)
    return values.to(outs.dtype), torch.logsumexp(lses, 0)


def one_after_the_other(outs: Tensor, lses: Tensor) -> Merged:
    parts = [Partial(out.to(lses.dtype), lse) for out, lse in zip(outs, lses, strict=True)]
    whole = reduce(merge, parts)
    return whole.out.to(outs.dtype), whole.lse


def from_the_total(outs: Tensor, lses: Tensor) -> Merged:
    total = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - total.masked_fill(total == -math.inf, 0.0)).unsqueeze(-1)
    return (weights * outs.to(lses.dtype)).sum(0).to(outs.dtype), total


def in_pairs(outs: Tensor, lses: Tensor) -> Merged:
    parts = [Partial(out.to(lses.dtype), lse) for out, lse in zip(outs, lses, strict=True)]
    while len(parts) > 1:
        parts = [reduce(merge, parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts[0].out.to(outs.dtype), parts[0].lse


RIGHT = (in_one_go, one_after_the_other, from_the_total, in_pairs)


def shared(weights: Tensor, outs: Tensor) -> Tensor:
    return (weights.unsqueeze(-1) * outs).sum(0).to(outs.dtype)


def softmax(lses: Tensor) -> Tensor:
    return torch.nan_to_num(lses.softmax(0))


def drops_the_last(outs: Tensor, lses: Tensor) -> Tensor:
    return in_one_go(outs[:-1], lses[:-1])[0] if len(outs) > 1 else outs[0]


def in_place(outs: Tensor, lses: Tensor) -> Merged:
    found = in_one_go(outs, lses)
    lses -= lses.max(0).values
    return found


def sums_in_the_half_dtype(outs: Tensor, lses: Tensor) -> Tensor:
    weights = softmax(lses).to(outs.dtype).unsqueeze(-1)
    return reduce(torch.add, weights * outs)


WRONG: dict[str, tuple[str, Callable[[Tensor, Tensor], Any]]] = {
    "the mean of the ranks": ("values", lambda outs, lses: outs.mean(0)),
    "lse added up": ("values", lambda outs, lses: (in_one_go(outs, lses)[0], lses.sum(0))),
    "the largest lse alone": ("values", lambda outs, lses: (in_one_go(outs, lses)[0], lses.max(0).values)),
    "base 2 taken for e": ("values", lambda outs, lses: shared(softmax(lses / math.log(2)), outs)),
    "lse in base 2": ("values", lambda outs, lses: (in_one_go(outs, lses)[0], in_one_go(outs, lses)[1] / math.log(2))),
    "weights from the first rank": ("values", lambda outs, lses: shared(torch.exp(lses - lses[0]), outs)),
    "the last rank is dropped": ("values", drops_the_last),
    "weights of the other rank": ("values", lambda outs, lses: shared(softmax(lses).flip(0), outs)),
    "changes lse in place": ("values", in_place),
    "float32 for bfloat16": ("dtypes", lambda outs, lses: (softmax(lses).unsqueeze(-1) * outs).sum(0)),
    "sums in the half dtype": ("dtypes", sums_in_the_half_dtype),
    "an empty rank is NaN": ("empty ranks", lambda outs, lses: shared(torch.exp(lses - lses[0]) / torch.exp(lses - lses[0]).sum(0), outs)),
    "a blind row is NaN": ("blind rows", lambda outs, lses: shared(lses.softmax(0), outs)),
    "a blind row sees all": ("blind rows", lambda outs, lses: shared(softmax(lses), outs) + (lses == -math.inf).all(0).unsqueeze(-1)),
    "a small number for −∞": ("unwritten", lambda outs, lses: shared(softmax(lses.clamp(min=-60.0)), outs)),
    "no maximum": ("large lse", lambda outs, lses: shared(torch.exp(lses) / torch.exp(lses).sum(0), outs)),
    "small weights are dropped": ("small weights", lambda outs, lses: shared(softmax(lses), outs) * (lses.max(0).values - lses.min(0).values < 60).unsqueeze(-1)),
    "memory read as if dense": ("strided", lambda outs, lses: shared(softmax(lses), torch.as_strided(outs, outs.shape, torch.empty(outs.shape).stride()))),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("right", RIGHT)
def test_a_right_merge_passes(right: Callable[..., Any], seed: int) -> None:
    report = check_merge(right, seed=seed)
    assert report.ok and len(report.findings) == len(CHECKS), report.failed


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_merge_falls_to_its_check(name: str) -> None:
    check, wrong = WRONG[name]
    report = check_merge(wrong)
    assert check in report.failed, (report.failed, [each.evidence for each in report.findings])


def test_every_check_has_its_wrong_merge() -> None:
    assert {check for check, _ in WRONG.values()} == {*CHECKS}


def test_base_2() -> None:
    def base_2(outs: Tensor, lses: Tensor) -> Merged:
        out, lse = in_one_go(outs, lses * math.log(2))
        return out, lse / math.log(2)

    assert check_merge(base_2, base=2).ok
    assert "values" in check_merge(base_2).failed and "values" in check_merge(in_one_go, base=2).failed


def test_what_is_no_attention_says_so() -> None:
    def raises(outs: Tensor, lses: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    assert "RuntimeError: no such kernel" in check_merge(raises, only=["values"]).findings[0].evidence
    assert "is NoneType" in check_merge(lambda outs, lses: None, only=["values"]).findings[0].evidence
    assert "lse is to be" in check_merge(lambda o, s: (o[0], o[0]), only=["values"]).findings[0].evidence
    for target, options in ((in_one_go, {"only": ["no check"]}), (3, {}), (in_one_go, {"base": 1})):
        with pytest.raises(BackendError):
            check_merge(target, **options)


def test_a_case_is_what_it_says() -> None:
    outs, lses = partials(Case(3, without="a rank", unwritten=True), math.e, 0)
    assert (lses[0] == -math.inf).all() and torch.isfinite(lses[1:]).all() and (outs[0] > 1e29).all()
    assert not partials(Case(3, strided=True), math.e, 0)[0].is_contiguous()
    assert partials(Case(2), 2.0, 0)[1].mul(math.log(2)).allclose(partials(Case(2), math.e, 0)[1])
