"""Every block backend gives the oracle's forward on its tile, and gradients from the final lse and delta."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab.blocks import available, get_block
from ringlab.blocks.naive import Naive
from ringlab.blocks.protocol import BackwardRows, Block
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.merge import Partial, merge
from tests.laws.draw import SEEDS, Shape, refute, shapes, tensors

BLOCKS = tuple(get_block(name, torch.zeros(1, 1, 1, 1)) for name in available())
# Float64 shows whether the mathematics is right. The rounding errors of other dtypes are measured on fixed
# cases, in tests/substrates, because a search would find inputs for which the reference is exact by luck.
Keys = list[slice]


def causal_shape(shape: Shape) -> Shape:
    """Return the shape with at least as many rows as keys, as causal tiles have."""
    return replace(shape, Lq=max(shape.Lq, shape.Lk))


def all_in_blocks(
    block: Block, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, keys: Keys, causal: bool, scale: float
) -> Results:
    """Return attention as a rank computes it: merged partials of blocks, then gradients block by block."""
    state = Partial.identity(q, v.shape[-1])
    for part in keys:
        state = merge(state, block.forward(q, k[..., part, :], v[..., part, :], causal=causal, scale=scale))
    out = state.out.to(q.dtype)
    delta = (dout.to(state.out.dtype) * out.to(state.out.dtype)).sum(-1)
    dq, dk, dv = [], [], []
    for part in keys:
        blocks = (k[..., part, :], v[..., part, :])
        rows = BackwardRows(dout, q, out, state.lse, delta)
        gradients = block.backward(rows, *blocks, causal=causal, scale=scale)
        for total, gradient in zip((dq, dk, dv), gradients, strict=True):
            total.append(gradient)
    total_dq = sum(part.to(state.out.dtype) for part in dq)
    return Results(
        out, state.lse, total_dq.to(q.dtype), torch.cat(dk, -2).to(q.dtype), torch.cat(dv, -2).to(q.dtype)
    )  # type: ignore[union-attr]


def assert_within_bounds(
    results: Results, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any
) -> None:
    true = truth(q, k, v, dout, **options)
    allowed, measured = bounds(q, k, v, dout, true=true, **options), errors(results, true)
    for name in NAMES:
        assert measured[name] <= allowed[name], (
            f"{name}: error {measured[name]:.2e}, allowed {allowed[name]:.2e}"
        )


def law_a_tile_is_attention(
    block: Block, shape: Shape, seed: int, dtype: torch.dtype, causal: bool, temperature: float
) -> None:
    q, k, v, dout = tensors(causal_shape(shape) if causal else shape, seed, dtype)
    scale = temperature * shape.D**-0.5
    results = all_in_blocks(block, q, k, v, dout, [slice(None)], causal, scale)
    assert_within_bounds(results, q, k, v, dout, causal=causal, scale=scale)


def law_blocks_of_keys_add_up(block: Block, shape: Shape, seed: int, dtype: torch.dtype, cut: int) -> None:
    """Full tiles over two parts of the keys, with the lse and delta of all keys, add up to attention."""
    q, k, v, dout = tensors(shape, seed, dtype)
    scale, cut = shape.D**-0.5, cut % (shape.Lk + 1)
    parts = [part for part in (slice(0, cut), slice(cut, shape.Lk)) if part.start < part.stop]
    results = all_in_blocks(block, q, k, v, dout, parts, False, scale)
    assert_within_bounds(results, q, k, v, dout, causal=False, scale=scale)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
@settings(max_examples=25)
@given(shape=shapes(), seed=SEEDS, causal=st.booleans(), temperature=st.sampled_from([0.5, 1.0, 4.0]))
def test_a_tile_is_attention(block: Block, shape: Shape, seed: int, causal: bool, temperature: float) -> None:
    law_a_tile_is_attention(block, shape, seed, torch.float64, causal, temperature)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
@settings(max_examples=25)
@given(shape=shapes(), seed=SEEDS, cut=st.integers(0, 24))
def test_blocks_of_keys_add_up(block: Block, shape: Shape, seed: int, cut: int) -> None:
    law_blocks_of_keys_add_up(block, shape, seed, torch.float64, cut)


# Each mutant is the naive block with one fault.


class DeltaOfTheBlock(Naive):
    """A block that takes delta from its own partial instead of the final one."""

    def backward(self, rows: BackwardRows, k: Tensor, v: Tensor, **options: Any) -> Any:
        own = self.forward(rows.q, k, v, **options)
        return super().backward(replace(rows, delta=(rows.dout * own.out).sum(-1)), k, v, **options)


class ForgetsScaleInQueries(Naive):
    def backward(self, *args: Any, scale: float, **options: Any) -> Any:
        dq, dk, dv = super().backward(*args, scale=scale, **options)
        return dq / scale, dk, dv


SHAPES = [Shape(1, 4, 2, 6, 6, 8), Shape(2, 2, 2, 9, 5, 3)]
TILES = [(shape, 0, torch.float64, causal, 2.0) for shape, causal in itertools.product(SHAPES, (True, False))]
CUTS = [(shape, 0, torch.float64, 2) for shape in SHAPES]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("law", "mutant", "examples"),
    [
        (law_a_tile_is_attention, ForgetsScaleInQueries(), TILES),
        (law_blocks_of_keys_add_up, DeltaOfTheBlock(), CUTS),
    ],
    ids=lambda case: case.__name__ if callable(case) else type(case).__name__,
)
def test_the_law_notices(law: Callable[..., None], mutant: Block, examples: list[Any]) -> None:
    refute(law, Naive(), mutant, examples)
