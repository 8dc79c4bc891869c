"""Blockwise feed-forward and recomputed layers: the same values, less memory, and the ring goes round again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster, launch
from ringlab.comm.ring import Ring
from ringlab.errors import ShapeError
from ringlab.nn import FeedForward, ModelConfig
from tests.nn.programs import gradients_of_a_step

CONFIG = ModelConfig(vocabulary=50, width=16, layers=3, heads=4, kv_heads=2, hidden=64)
TOKENS = torch.randint(50, (1, 600), generator=torch.Generator().manual_seed(0))


def feed_forward_step(ring: Ring, block: int | None, x: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    layer = FeedForward(16, 64, block).to(x.dtype)
    x = x.clone().requires_grad_()
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))]


@pytest.mark.parametrize("block", [1, 7, 64, 200])
def test_blocks_of_tokens_give_the_same_values(block: int) -> None:
    x = torch.randn(2, 64, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    [whole] = VirtualCluster(1).run(feed_forward_step, None, x).results
    [parts] = VirtualCluster(1).run(feed_forward_step, block, x).results
    for one, other in zip(parts, whole, strict=True):
        assert ((one - other).abs() <= 1000 * torch.finfo(torch.float64).eps * (1 + other.abs().max())).all()


def peak(program: object, *args: object) -> int:
    return VirtualCluster(1).run(program, *args).memory[0].peak_bytes  # type: ignore[arg-type]


def test_a_block_is_what_the_hidden_values_take() -> None:
    """All tokens: gate, silu, up, their product, and gradients, 64 wide; by blocks only x, out and the weights grow."""
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
