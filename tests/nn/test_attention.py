"""ContextParallelAttention is an ordinary layer, wherever its tokens are; rotary positions are global.

A blockwise feed-forward and recomputed layers give the same values with less memory. Recomputing a layer runs
its ring again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster, launch, oracle, zigzag
from ringlab.comm.ring import Ring
from ringlab.errors import AgreementError, LayoutError, MaskError, ShapeError, WorldSizeError
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.nn import Context, ContextParallelAttention, FeedForward, ModelConfig
from ringlab.nn.attention import rotate, rotation
from tests.laws.draw import LAYOUTS, SEEDS
from tests.nn.ways import gradients_of_a_step

EPSILON = torch.finfo(torch.float64).eps


def layer_of(qk_norm: bool, dtype: torch.dtype = torch.float64, **more: object) -> ContextParallelAttention:
    layer = ContextParallelAttention(8, heads=4, kv_heads=2, head_dim=6, qk_norm=qk_norm, **more)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.4, generator=generator)
    return layer.to(dtype)


def normal(S: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, S, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def run(layer: ContextParallelAttention, x: Tensor, dout: Tensor, context: Context | None) -> list[Tensor]:
    """Return the output, the gradient of x, and the gradients of the weights."""
    x = x.clone().requires_grad_()
    out = layer(x, context)
    return [out.detach(), *torch.autograd.grad(out, (x, *layer.parameters()), dout)]


def over_ranks(
    qk_norm: bool,
    layout: Layout,
    whole: Tensor,
    dout: Tensor,
    more: dict[str, object] | None = None,
    **options: object,
) -> list[Tensor]:
    def program(ring: Ring) -> list[Tensor]:
        context = Context(ring, layout, **options)
        layer = layer_of(qk_norm, whole.dtype, **(more or {}))
        return run(layer, context.shard(whole, dim=1), context.shard(dout, dim=1), context)

    shards = VirtualCluster(layout.P, memory=False).run(program).results
    out, dx, *weights = zip(*shards, strict=True)
    return [layout.unshard(out, dim=1), layout.unshard(dx, dim=1), *(sum(parts) for parts in weights)]


@settings(max_examples=25)
@given(
    layout=LAYOUTS, seed=SEEDS, qk_norm=st.booleans(), sinks=st.booleans(), Dv=st.sampled_from([None, 3, 10])
)
def test_scattered_equals_together(
    layout: Layout, seed: int, qk_norm: bool, sinks: bool, Dv: int | None
) -> None:
    """The layer over ranks has the output and gradients of the layer alone; its sinks count once."""
    x, dout, more = normal(layout.S, seed), normal(layout.S, seed + 1), {"sinks": sinks, "value_dim": Dv}
    together = run(layer_of(qk_norm, **more), x, dout, None)
    scattered = over_ranks(qk_norm, layout, x, dout, more, block="naive")
    for one, other in zip(scattered, together, strict=True):
        assert ((one - other).abs() <= 1000 * EPSILON * (1 + other.abs().max())).all()


@pytest.mark.parametrize(("sunk", "Dv"), [(False, 6), (True, 6), (True, 3), (True, 10)])
def test_the_layer_alone_is_the_oracles_attention(sunk: bool, Dv: int) -> None:
    layer, x = layer_of(False, sinks=sunk, value_dim=Dv), normal(9, 2)
    assert (layer.sinks is not None) is sunk and (layer.sinks is None or layer.sinks.abs().min() > 0)
    q, k = (project(x).unflatten(-1, (-1, 6)).transpose(1, 2) for project in (layer.q, layer.k))
    v, turn = layer.v(x).unflatten(-1, (-1, Dv)).transpose(1, 2), rotation(torch.arange(9), 6)
    sinks = None if layer.sinks is None else layer.sinks.detach().numpy()
    out, _ = oracle.attention(
        rotate(q, turn).detach(), rotate(k, turn).detach(), v.detach(), causal=True, sinks=sinks
    )
    expected = torch.from_numpy(out).transpose(1, 2).flatten(2) @ layer.out.weight.T
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


# Rotary positions.


@settings(max_examples=30)
@given(a=st.integers(0, 10**6), b=st.integers(0, 10**6), moved=st.integers(0, 10**6), seed=SEEDS)
def test_scores_depend_on_the_distance_alone(a: int, b: int, moved: int, seed: int) -> None:
    q, k = (normal(1, seed + i)[:1, None] for i in range(2))

    def score(i: int, j: int) -> Tensor:
        return (rotate(q, rotation(torch.tensor([i]), 8)) * rotate(k, rotation(torch.tensor([j]), 8))).sum()

    size = q.norm() * k.norm()
    angle = 2e6 * EPSILON  # the rounding of an angle of two million
    assert (score(a, b) - score(a + moved, b + moved)).abs() <= 8 * angle * size + 100 * EPSILON * size


def test_a_turn_keeps_lengths_and_position_zero_is_none() -> None:
    x = normal(7, 0)[:, None]
    turned = rotate(x, rotation(torch.arange(7), 8))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0)
    assert torch.equal(turned[:, :, 0], x[:, :, 0]) and not torch.equal(turned[:, :, 1], x[:, :, 1])


# Position ids and masks.


def test_position_ids_may_start_anew_with_each_document() -> None:
    layout, mask = zigzag(20, 2), Mask(documents=(7, 13))
    ids = torch.cat([torch.arange(7), torch.arange(13)])
    x, dout = normal(20, 8), normal(20, 9)

    def program(ring: Ring) -> list[Tensor]:
        given = layout.shard(ids, ring.rank, dim=-1)
        context = Context(ring, layout, mask, block="naive", position_ids=given)
        return [layer_of(False)(context.shard(x, dim=1), context)]

    restarted = layout.unshard([r[0] for r in VirtualCluster(2).run(program).results], dim=1)
    apart = torch.cat([layer_of(False)(x[:, :7]), layer_of(False)(x[:, 7:])], dim=1)
    counted_on = over_ranks(False, layout, x, dout, mask=mask, block="naive")[0]
    for out in (restarted, counted_on):
        assert ((out - apart).abs() <= 1000 * EPSILON * (1 + apart.abs().max())).all()


def refused(
    ring: Ring, wrong_rank: int, kind: type[Exception], said: str, layout: Layout, **options: object
) -> bool:
    """Check that the rank with wrong options reports the options, and other ranks report the difference."""
    wrong = ring.rank == wrong_rank or wrong_rank < 0
    with pytest.raises(kind if wrong else AgreementError, match=said if wrong else "same call"):
        Context.agreed(ring, layout, **(options if wrong else {}))
    return True


@pytest.mark.parametrize(
    ("kind", "said", "layout", "options"),
    [
        (LayoutError, "position 4 for local token 2 of rank 1", zigzag(8, 2), {"position_ids": torch.tensor([2, 3, 2, 3])}),
        (LayoutError, "4 position ids on rank 1", zigzag(8, 2), {"position_ids": torch.arange(8)}),
        (MaskError, "documents of 8 tokens in all", zigzag(8, 2), {"mask": Mask(documents=(9,))}),
    ],
)  # fmt: skip
def test_a_context_that_cannot_be_is_refused_on_every_rank(kind, said, layout, options) -> None:  # type: ignore[no-untyped-def]
    def program(ring: Ring) -> bool:
        return refused(ring, 1, kind, said, layout, **options)

    assert VirtualCluster(2).run(program).results == [True, True]


def test_layouts_of_another_world_and_heads_that_do_not_fit_are_refused() -> None:
    def program(ring: Ring) -> bool:
        return refused(ring, -1, WorldSizeError, "a layout for 2 ranks", zigzag(8, 3))

    assert VirtualCluster(2).run(program).results == [True, True]
    with pytest.raises(ShapeError, match="divisible"):
        ContextParallelAttention(8, heads=4, kv_heads=3)
    with pytest.raises(ShapeError, match="even head dim"):
        ContextParallelAttention(12, heads=4)


def test_tokens_of_another_length_are_refused_on_every_rank() -> None:
    """Tokens that rank 1 forgot to shard are refused on every rank."""
    x = normal(8, 0)

    def program(ring: Ring) -> bool:
        context = Context(ring, zigzag(8, 2))
        mine = context.shard(x, dim=1) if ring.rank == 0 else x
        kind, said = (
            (AgreementError, "rank 1: error ShapeError") if ring.rank == 0 else (ShapeError, "whole sequence")
        )
        with pytest.raises(kind, match=said):
            layer_of(False)(mine, context)
        return True

    assert VirtualCluster(2).run(program).results == [True, True]


CONFIG = ModelConfig(vocabulary=50, width=16, layers=3, heads=4, kv_heads=2, hidden=64)
TOKENS = torch.randint(50, (1, 600), generator=torch.Generator().manual_seed(0))


def feed_forward_step(ring: Ring, block: int | None, x: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    layer = FeedForward(16, 64, block).to(x.dtype)
    x = x.clone().requires_grad_()
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))]


@pytest.mark.parametrize("block", [1, 7])
def test_blocks_of_tokens_give_the_same_values(block: int) -> None:
    x = torch.randn(2, 64, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    [whole] = VirtualCluster(1).run(feed_forward_step, None, x).results
    [parts] = VirtualCluster(1).run(feed_forward_step, block, x).results
    for one, other in zip(parts, whole, strict=True):
        assert ((one - other).abs() <= 1000 * torch.finfo(torch.float64).eps * (1 + other.abs().max())).all()


def peak(program: object, *args: object) -> int:
    return VirtualCluster(1).run(program, *args).memory[0].peak_bytes  # type: ignore[arg-type]


def test_a_block_is_what_the_hidden_values_take() -> None:
    """A feed-forward in blocks holds the hidden values of one block; without blocks, it holds those of all tokens."""
    x = torch.randn(1, 2048, 16)
    whole, by_1024, by_64 = (peak(feed_forward_step, block, x) for block in (None, 1024, 64))
    hidden = x.shape[1] * 64 * 4
    assert whole > 4 * hidden
    assert by_64 < by_1024 - hidden and by_1024 < whole - hidden and by_64 < whole - 3 * hidden


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ShapeError, match="at least 1 token"):
        FeedForward(8, 16, 0)


def test_recomputed_layers_give_the_same_bits_and_communicate_again_in_order() -> None:
    kept, anew = CONFIG, replace(CONFIG, recompute=True)
    virtual = {config: VirtualCluster(2).run(gradients_of_a_step, config, TOKENS) for config in (kept, anew)}
    processes = launch(gradients_of_a_step, 2, anew, TOKENS)
    for rank in range(2):
        expected = virtual[kept].results[rank]
        for outcome in (virtual[anew], processes):
            assert outcome.results[rank].keys() == expected.keys()
            assert all(same(outcome.results[rank][name], value) for name, value in expected.items())
        order = [e.tag for e in sorted(virtual[anew].trace.exchanges(rank), key=lambda e: e.index)]
        assert order == [e.tag for e in sorted(processes.trace.exchanges(rank), key=lambda e: e.index)]
        forwards = CONFIG.layers  # one hop a layer
        assert len(order) == len(list(virtual[kept].trace.exchanges(rank))) + forwards
        assert virtual[anew].memory[rank].peak_bytes < virtual[kept].memory[rank].peak_bytes


def same(one: Tensor | float, other: Tensor | float) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other
