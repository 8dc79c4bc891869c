"""Merge is a commutative monoid up to rounding; merging the parts of any split of keys gives attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringlab import oracle
from ringlab.blocks.naive import Naive
from ringlab.merge import Partial, merge
from tests.laws.draw import SEEDS, Shape, refute, shapes, tensors

Merge = Callable[[Partial, Partial], Partial]
EPSILON = torch.finfo(torch.float64).eps

LSE = st.one_of(st.just(-math.inf), st.floats(-5, 5), st.floats(-800, 800))
# No subnormal numbers are drawn, because they round by an absolute amount, which no relative bound covers.
NUMBERS = st.floats(-10, 10).map(lambda x: x if abs(x) > 1e-290 else 0.0)


def partial_of(lse: float, values: list[float]) -> Partial:
    """Return a partial of one row; its out is 0 if the row saw no key."""
    out = torch.tensor(values, dtype=torch.float64) * (0.0 if lse == -math.inf else 1.0)
    return Partial(out.view(1, 1, 1, -1) + 0.0, torch.tensor(lse, dtype=torch.float64).view(1, 1, 1))


PARTIALS = st.builds(partial_of, LSE, st.lists(NUMBERS, min_size=2, max_size=2))
IDENTITY = partial_of(-math.inf, [0.0, 0.0])


def assert_same_up_to_rounding(a: Partial, b: Partial, *inputs: Partial) -> None:
    """Assert that a and b are equal up to the error ε|L| of a weight e^(lse − L) and a few roundings."""
    largest = max(float(x.lse.abs().masked_fill(x.lse.isinf(), 0).max()) for x in inputs)
    values = max(float(x.out.abs().max()) for x in inputs)
    unit = EPSILON * (8 + 2 * largest)
    assert a.out.isfinite().all() and b.out.isfinite().all()
    assert not a.lse.isnan().any() and not b.lse.isnan().any()
    assert float((a.out - b.out).abs().max()) <= unit * values
    assert torch.equal(a.lse.isinf(), b.lse.isinf())
    assert float((a.lse - b.lse).masked_fill(a.lse.isinf(), 0).abs().max()) <= unit


def law_identity(merge: Merge, a: Partial) -> None:
    for merged in (merge(a, IDENTITY), merge(IDENTITY, a)):
        assert torch.equal(merged.out, a.out) and torch.equal(merged.lse, a.lse)


def law_commutative(merge: Merge, a: Partial, b: Partial) -> None:
    assert_same_up_to_rounding(merge(a, b), merge(b, a), a, b)


def law_associative(merge: Merge, a: Partial, b: Partial, c: Partial) -> None:
    assert_same_up_to_rounding(merge(merge(a, b), c), merge(a, merge(b, c)), a, b, c)


def law_lies_between(merge: Merge, a: Partial, b: Partial) -> None:
    """A merged row is between the two rows, and its lse is at least the lse of each."""
    if IDENTITY.lse in (a.lse, b.lse):
        return
    merged = merge(a, b)
    slack = EPSILON * 8 * max(float(a.out.abs().max()), float(b.out.abs().max()))
    assert (merged.out >= torch.minimum(a.out, b.out) - slack).all()
    assert (merged.out <= torch.maximum(a.out, b.out) + slack).all()
    assert (merged.lse >= torch.maximum(a.lse, b.lse)).all()


def law_any_split_is_attention(
    merge: Merge, shape: Shape, cuts: list[int], seed: int, temperature: float
) -> None:
    """Blocks of keys, merged one after the other, give the attention over all keys."""
    q, k, v, _ = tensors(shape, seed)
    scale = temperature * shape.D**-0.5
    edges = sorted({0, shape.Lk, *(cut % shape.Lk for cut in cuts)})
    state = Partial.identity(q, v.shape[-1])
    for start, stop in itertools.pairwise(edges):
        keys = slice(start, stop)
        state = merge(state, Naive().forward(q, k[..., keys, :], v[..., keys, :], causal=False, scale=scale))
    truth = oracle.attention(q, k, v, scale=scale)
    expected = Partial(torch.from_numpy(truth.out), torch.from_numpy(truth.lse))
    loudest = Partial(
        v.abs().max().view(1, 1, 1, 1), 4 * shape.D * (scale * q.abs().max() * k.abs().max()).view(1, 1, 1)
    )
    assert_same_up_to_rounding(state, expected, expected, loudest)


@given(a=PARTIALS)
def test_identity_is_exact(a: Partial) -> None:
    law_identity(merge, a)


@given(a=PARTIALS, b=PARTIALS, c=PARTIALS)
def test_monoid(a: Partial, b: Partial, c: Partial) -> None:
    law_commutative(merge, a, b)
    law_associative(merge, a, b, c)
    law_lies_between(merge, a, b)


@given(
    shape=shapes(),
    cuts=st.lists(st.integers(0, 100), max_size=5),
    seed=SEEDS,
    temperature=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_any_split_is_attention(shape: Shape, cuts: list[int], seed: int, temperature: float) -> None:
    law_any_split_is_attention(merge, shape, cuts, seed, temperature)


def test_two_empty_partials_stay_empty() -> None:
    both = merge(IDENTITY, IDENTITY)
    assert torch.equal(both.out, IDENTITY.out) and torch.equal(both.lse, IDENTITY.lse)


# Mutants: common mistakes in writing merge.


def weigh(a: Partial, b: Partial, lse: Tensor) -> Tensor:
    return a.out * torch.exp(a.lse - lse).unsqueeze(-1) + b.out * torch.exp(b.lse - lse).unsqueeze(-1)


def unguarded(a: Partial, b: Partial) -> Partial:
    """Merge by the textbook formula, which computes −inf − (−inf)."""
    lse = torch.logaddexp(a.lse, b.lse)
    return Partial(weigh(a, b, lse), lse)


def average(a: Partial, b: Partial) -> Partial:
    return Partial((a.out + b.out) / 2, torch.logaddexp(a.lse, b.lse))


def rescales_only_the_new(a: Partial, b: Partial) -> Partial:
    lse = torch.logaddexp(a.lse, b.lse)
    fresh = torch.exp(b.lse - lse).nan_to_num(0.0).unsqueeze(-1)
    return Partial(a.out + fresh * b.out, lse)


def keeps_the_larger(a: Partial, b: Partial) -> Partial:
    """Take the maximum instead of logaddexp."""
    lse = torch.maximum(a.lse, b.lse)
    total = weigh(a, b, lse.masked_fill(lse == -math.inf, 0.0))
    return Partial(total, lse)


A, B, C = partial_of(0.3, [1.0, -2.0]), partial_of(-1.1, [4.0, 0.5]), partial_of(2.0, [-3.0, 7.0])
FAR = partial_of(750.0, [2.0, 2.0])
ONES = [(A,), (B,), (IDENTITY,)]
TWOS = list(itertools.product((A, B, C, FAR, IDENTITY), repeat=2))
THREES = list(itertools.product((A, B, C, IDENTITY), repeat=3))
SPLITS = [(Shape(1, 2, 1, 3, 6, 4), [2, 4], seed, 1.0) for seed in range(3)]


@pytest.mark.parametrize(
    ("law", "mutant", "examples"),
    [
        (law_identity, unguarded, ONES),
        (law_commutative, rescales_only_the_new, TWOS),
        (law_associative, average, THREES),
        (law_lies_between, keeps_the_larger, TWOS),
        (law_any_split_is_attention, rescales_only_the_new, SPLITS),
    ],
)
def test_the_law_notices(law: Callable[..., None], mutant: Merge, examples: list[Any]) -> None:
    refute(law, merge, mutant, examples)
