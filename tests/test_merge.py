"""Merging gives numbers worked out by hand, also in place and in mixed precision."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from ringlab.errors import ShapeError
from ringlab.merge import Partial, merge, merge_into, state_dtype


def of(values: list[float], lse: float) -> Partial:
    return Partial(
        torch.tensor(values, dtype=torch.float64).view(1, 1, 1, -1),
        torch.full((1, 1, 1), lse, dtype=torch.float64),
    )


def test_scores_2_and_1_then_3() -> None:
    """A block of scores 2 and 1 merged with one of score 3 gives the softmax over all three scores."""
    first = of([(10 * math.e + 20) / (math.e + 1)], math.log(math.e**2 + math.e))
    both = merge(first, of([30.0], 3.0))
    expected = (10 * math.e**2 + 20 * math.e + 30 * math.e**3) / (math.e**2 + math.e + math.e**3)
    assert both.out.item() == pytest.approx(expected, rel=1e-15)
    assert round(both.out.item(), 3) == 24.205
    assert both.lse.item() == pytest.approx(math.log(math.e + math.e**2 + math.e**3), rel=1e-15)


def test_a_far_larger_lse_takes_over_without_overflow() -> None:
    both = merge(of([1.0], -1e4), of([2.0], 1e4))
    assert both.out.item() == 2.0
    assert both.lse.item() == 1e4


def test_merge_into_equals_merge_on_those_rows_and_leaves_the_others() -> None:
    torch.manual_seed(0)
    state = Partial(torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6))
    part = Partial(torch.randn(1, 2, 3, 4), torch.tensor([[[-math.inf, 0.5, 9.0]] * 2]))
    part.out[:, :, 0] = 0
    rows = slice(2, 5)
    expected = merge(Partial(state.out[:, :, rows], state.lse[:, :, rows]), part)
    before = state.out.clone(), state.lse.clone()
    merge_into(state, rows, part)
    assert torch.equal(state.out[:, :, rows], expected.out) and torch.equal(
        state.lse[:, :, rows], expected.lse
    )
    for now, then in zip((state.out, state.lse), before, strict=True):
        assert torch.equal(now[:, :, :2], then[:, :, :2]) and torch.equal(now[:, :, 5:], then[:, :, 5:])


def _by_lerp(a: Partial, b: Partial) -> Partial:
    lse = torch.logaddexp(a.lse, b.lse)
    return Partial(torch.lerp(a.out, b.out, (b.lse - lse).exp().unsqueeze(-1)), lse)


def _by_rounded_total(a: Partial, b: Partial) -> Partial:
    lse = torch.logaddexp(a.lse, b.lse)
    weight_a, weight_b = ((x.lse - lse).exp().unsqueeze(-1) for x in (a, b))
    return Partial(a.out * weight_a + b.out * weight_b, lse)


def _in_place(a: Partial, b: Partial) -> Partial:
    state = Partial(a.out.clone(), a.lse.clone())
    merge_into(state, slice(0, a.lse.shape[-1]), b)
    return state


@pytest.mark.parametrize(
    ("merging", "exact"), [(merge, True), (_in_place, True), (_by_lerp, False), (_by_rounded_total, False)]
)
def test_large_lse_and_small_weights_cost_no_digits(merging: Callable[..., Partial], exact: bool) -> None:
    """Both weights are functions of d = Lb − La, which is rounded to |d|·u: this bounds their relative error;
    exp, the sigmoid's sum and quotient, the product and the sum add a unit of last place or two each.
    """
    generator = torch.Generator().manual_seed(0)
    lse = (1000 + 8 * torch.randn(2, 1, 1, 20_000, generator=generator)).float()
    out = torch.randn(2, 1, 1, 20_000, 4, generator=generator) * torch.tensor([1.0, 1e-3]).view(2, 1, 1, 1, 1)
    parts = [Partial(out[i], lse[i]) for i in (0, 1)]
    gap = (lse[1].double() - lse[0].double()).unsqueeze(-1)
    terms = out[0].double() * torch.sigmoid(-gap), out[1].double() * torch.sigmoid(gap)
    bound = (gap.abs() + 8) * torch.finfo(torch.float32).eps / 2 * (terms[0].abs() + terms[1].abs())
    within = (merging(*parts).out.double() - sum(terms)).abs() <= bound
    assert bool(within.all()) is exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_state_is_float32_at_least(dtype: torch.dtype) -> None:
    identity = Partial.identity(torch.zeros(2, 3, 4, 5, dtype=dtype))
    assert (
        identity.out.dtype
        == identity.lse.dtype
        == state_dtype(dtype)
        == torch.promote_types(dtype, torch.float32)
    )
    assert identity.out.shape == (2, 3, 4, 5) and identity.lse.shape == (2, 3, 4)
    block = Partial(torch.ones(2, 3, 4, 5, dtype=dtype), torch.zeros(2, 3, 4, dtype=state_dtype(dtype)))
    assert merge(identity, block).out.dtype == state_dtype(dtype)
    assert torch.equal(merge(identity, block).out, torch.ones(2, 3, 4, 5, dtype=state_dtype(dtype)))


def test_an_lse_of_another_shape_is_refused() -> None:
    with pytest.raises(ShapeError, match="lse of shape"):
        Partial(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 4))
