"""Ring attention on virtual ranks is attention, whatever the layout: against the oracle, and by its symmetries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster, ring_attention
from ringlab.comm.ring import Ring
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.layout import Layout, contiguous, dealt, zigzag
from tests.laws.broken_rings import FAULTS, broken_ring
from tests.laws.draw import LAYOUTS, SEEDS, Shape, refute, tensors

Attention = Callable[..., Results]
EPSILON = torch.finfo(torch.float64).eps


def program(ring: Ring, whole: tuple[Tensor, ...], layout: Layout, causal: bool) -> tuple[Tensor, ...]:
    *qkv, dout = layout.shard(whole, ring.rank)
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    out, lse = ring_attention(
        q, k, v, ring=ring, layout=layout, causal=causal, block="naive", return_lse=True
    )
    return out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout)


def attend(
    whole: tuple[Tensor, ...], layout: Layout, causal: bool, run: Callable[..., Any] = program
) -> Results:
    """All results of the whole sequence, from a cluster of as many ranks as the layout has."""
    shards = VirtualCluster(layout.P, memory=False).run(run, whole, layout, causal).results
    out, lse, *gradients = zip(*shards, strict=True)
    return Results(layout.unshard(out), layout.unshard(lse, dim=-1), *map(layout.unshard, gradients))


def close(a: Tensor, b: Tensor, size: float) -> bool:
    """Equal up to a thousand roundings of numbers as large as `size`, in float64."""
    return bool(((a - b).abs() <= 1000 * EPSILON * size).all())


def law_equals_the_oracle(attend: Attention, whole: tuple[Tensor, ...], layout: Layout, causal: bool) -> None:
    true = truth(*whole, causal=causal)
    allowed, measured = bounds(*whole, causal=causal, true=true), errors(attend(whole, layout, causal), true)
    for name in NAMES:
        assert measured[name] <= allowed[name], (
            f"{name}: error {measured[name]:.2e}, allowed {allowed[name]:.2e}"
        )


def law_linear_in_values(attend: Attention, whole: tuple[Tensor, ...], layout: Layout, causal: bool) -> None:
    q, k, v, dout = whole
    other = v.flip(-1) + 1.0
    one, two = (attend((q, k, x, dout), layout, causal).out for x in (v, other))
    both = attend((q, k, 2 * v - 3 * other, dout), layout, causal).out
    assert close(both, 2 * one - 3 * two, float(5 * other.abs().max()))


def law_constant_values_come_back(
    attend: Attention, whole: tuple[Tensor, ...], layout: Layout, causal: bool
) -> None:
    """Weights add up to one."""
    q, k, v, dout = whole
    out = attend((q, k, torch.full_like(v, 3.0), dout), layout, causal).out
    assert close(out, torch.full_like(out, 3.0), 3.0)


def law_order_of_keys_is_nothing(
    attend: Attention, whole: tuple[Tensor, ...], layout: Layout, causal: bool
) -> None:
    """Without a mask, keys are a set: any order gives the same rows, and gradients that moved along."""
    q, k, v, dout = whole
    order = torch.randperm(layout.S, generator=torch.Generator().manual_seed(layout.S))
    before, after = (
        attend((q, keys, values, dout), layout, False)
        for keys, values in ((k, v), (k[..., order, :], v[..., order, :]))
    )
    size = float(1 + before.dk.abs().max() + before.dv.abs().max() + v.abs().max())
    assert close(after.out, before.out, size)
    assert close(after.dk, before.dk[..., order, :], size) and close(after.dv, before.dv[..., order, :], size)


def law_the_future_moves_nothing(
    attend: Attention, whole: tuple[Tensor, ...], layout: Layout, causal: bool
) -> None:
    """Change token j: no row before it moves by a bit; its own row does."""
    j = layout.S // 2
    moved = tuple(x.clone() for x in whole)
    for x in moved[:3]:
        x[..., j, :] += 1.0
    before, after = attend(whole, layout, True), attend(moved, layout, True)
    assert torch.equal(before.out[..., :j, :], after.out[..., :j, :])
    assert torch.equal(before.lse[..., :j], after.lse[..., :j])
    assert not torch.equal(before.out[..., j, :], after.out[..., j, :])


def law_a_shift_of_keys_moves_lse_only(
    attend: Attention, whole: tuple[Tensor, ...], layout: Layout, causal: bool
) -> None:
    """Adding c to every key adds scale·q·c to all scores of a row, and so to its lse."""
    q, k, v, dout = whole
    shift = torch.linspace(-2, 2, q.shape[-1], dtype=q.dtype)
    before, after = attend(whole, layout, causal), attend((q, k + shift, v, dout), layout, causal)
    moved = (q @ shift) * q.shape[-1] ** -0.5
    size = float(1 + moved.abs().max() + before.lse.abs().max()) * float(1 + v.abs().max())
    assert close(after.out, before.out, size)
    assert close(after.lse, before.lse + moved, size)


def law_shared_heads_are_repeated_heads(
    attend: Attention, whole: tuple[Tensor, ...], layout: Layout, causal: bool
) -> None:
    """Grouped heads give what repeating K/V would; their gradients are the sums."""
    q, k, v, dout = whole
    group = q.shape[1] // k.shape[1]
    repeated = (x.repeat_interleave(group, dim=1) for x in (k, v))
    shared, apart = attend(whole, layout, causal), attend((q, *repeated, dout), layout, causal)
    size = float(1 + apart.dk.abs().sum(1).max() + apart.dv.abs().sum(1).max())
    assert close(shared.out, apart.out, size)
    for name in ("dk", "dv"):
        assert close(getattr(shared, name), getattr(apart, name).unflatten(1, (-1, group)).sum(2), size)


def law_scattered_equals_together(
    attend: Attention, whole: tuple[Tensor, ...], layout: Layout, causal: bool
) -> None:
    """A layout is bookkeeping: one rank with everything gives the same."""
    scattered, together = attend(whole, layout, causal), attend(whole, contiguous(layout.S, 1), causal)
    for name in NAMES:
        one, other = getattr(scattered, name), getattr(together, name)
        assert close(one, other, float(1 + other.abs().max()))


LAWS = (
    law_equals_the_oracle,
    law_linear_in_values,
    law_constant_values_come_back,
    law_order_of_keys_is_nothing,
    law_the_future_moves_nothing,
    law_a_shift_of_keys_moves_lse_only,
    law_shared_heads_are_repeated_heads,
    law_scattered_equals_together,
)


@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=12)
@given(
    layout=LAYOUTS,
    K=st.integers(1, 2),
    group=st.integers(1, 3),
    D=st.sampled_from([2, 8]),
    seed=SEEDS,
    causal=st.booleans(),
)
def test_ring_attention(
    law: Callable[..., None], layout: Layout, K: int, group: int, D: int, seed: int, causal: bool
) -> None:
    whole = tensors(Shape(1, K * group, K, layout.S, layout.S, D), seed)
    law(attend, whole, layout, causal)


# Mutants: a ring written by hand, with one fault each.

PROBLEM = tensors(Shape(1, 4, 2, 12, 12, 8), 1)
EXAMPLES = [
    (PROBLEM, layout, causal)
    for layout in (contiguous(12, 3), zigzag(12, 3), dealt(12, 3, chunk=1))
    for causal in (True, False)
]


def mutant(fault: str) -> Attention:
    def attend_wrongly(whole: tuple[Tensor, ...], layout: Layout, causal: bool) -> Results:
        return attend(whole, layout, causal, broken_ring(fault))

    attend_wrongly.__name__ = fault
    return attend_wrongly


@pytest.mark.parametrize("fault", FAULTS)
def test_the_oracle_notices_every_fault(fault: str) -> None:
    refute(law_equals_the_oracle, attend, mutant(fault), EXAMPLES)


def test_the_ring_by_hand_is_right_without_a_fault() -> None:
    for example in EXAMPLES:
        law_equals_the_oracle(mutant("none"), *example)


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        (law_linear_in_values, "values_squared"),
        (law_constant_values_come_back, "adds_the_blocks"),
        (law_order_of_keys_is_nothing, "skips_the_last_block"),
        (law_order_of_keys_is_nothing, "gradients_stay_where_computed"),
        (law_the_future_moves_nothing, "mask_in_local_indices"),
        (law_the_future_moves_nothing, "sees_one_too_many"),
        (law_a_shift_of_keys_moves_lse_only, "no_scale"),
        (law_a_shift_of_keys_moves_lse_only, "float32_state"),
        (law_shared_heads_are_repeated_heads, "heads_in_turn"),
        (law_scattered_equals_together, "averages_the_blocks"),
        (law_scattered_equals_together, "delta_of_the_block"),
    ],
)
def test_the_law_notices(law: Callable[..., None], fault: str) -> None:
    refute(law, attend, mutant(fault), EXAMPLES)


def test_mutants_do_not_crash() -> None:
    """A fault that raises would be noticed without any law."""
    for fault in FAULTS:
        assert not any(math.isnan(float(x.sum())) for x in mutant(fault)(*EXAMPLES[0])), fault
