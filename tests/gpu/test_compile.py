"""A compiled layer over a ring of GPUs is as exact as an eager one, even if torch records CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cloudpickle", reason="needs cloudpickle: pip install cloudpickle")

from ringlab import launch, zigzag
from ringlab.comm.ring import Ring
from ringlab.nn.context import Context
from ringlab.nn.transformer import Layer, ModelConfig
from tests.gpu.test_transports import EVERYWHERE

P, S, WIDTH = 2, 96, 64
HOW: dict[str, dict[str, Any]] = {
    "aot_eager": {"backend": "aot_eager"},
    "inductor": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
}


def errors(ring: Ring, device: str, how: dict[str, Any], rounds: int = 4) -> list[tuple[float, float]]:
    """Return the errors of the compiled and of the eager layer against float64, of x's and each weight's gradient.

    The first rounds of "reduce-overhead" warm up and record, later ones replay.
    """
    torch.manual_seed(0)
    layer = Layer(ModelConfig(width=WIDTH)).to(device)
    x = zigzag(S, P).shard(torch.randn(2, S, WIDTH), ring.rank).to(device)
    context = Context(ring, zigzag(S, P), block="blockwise")

    def gradients(call: Any, x: torch.Tensor) -> list[torch.Tensor]:
        layer.zero_grad()
        x = x.clone().requires_grad_()
        call(x, context).square().sum().backward()
        return [leaf.grad.double().clone() for leaf in (x, *layer.parameters()) if leaf.grad is not None]

    compiled = torch.compile(layer, fullgraph=True, **how)
    made = [gradients(layer, x), *(gradients(compiled, x) for _ in range(rounds))]
    layer.double()
    exact = gradients(layer, x.double())
    eager, *rest = [
        [(y - true).norm().item() / true.norm().item() for y, true in zip(of, exact, strict=True)]
        for of in made
    ]
    return [(error, of_eager) for one in rest for error, of_eager in zip(one, eager, strict=True)]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("transport", EVERYWHERE)
def test_a_compiled_layer_is_as_exact_as_an_eager_one(transport: str, how: str) -> None:
    found = launch(errors, P, "cuda", HOW[how], transport=transport, memory=False, timeout=500.0).results
    assert all(error <= 2 * of_eager for one in found for error, of_eager in one)
