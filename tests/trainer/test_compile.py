"""A compiled model over a ring: the same bits, one graph before and one after each call of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from tests.trainer.model import Gradients, Model, gradients, share_over

P = 2


def step(ring: Ring, compiler: Callable[[Any], Any], validate: bool) -> tuple[float, Gradients]:
    model = Model()
    loss = share_over(ring, compiler(model), validate=validate)
    loss.backward()
    return loss.item(), gradients(model)


def over(compiler: Callable[[Any], Any], validate: bool = True) -> list[tuple[float, Gradients]]:
    return VirtualCluster(P, memory=False).run(step, compiler, validate).results


@pytest.fixture
def graphs() -> list[int]:
    """The number of operations of each graph that `compiler` makes."""
    torch._dynamo.reset()
    counters.clear()
    return []


@pytest.mark.parametrize("validate", [True, False])
def test_the_same_bits(validate: bool, graphs: list[int]) -> None:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    found = over(lambda model: torch.compile(model, backend=backend), validate)
    for (loss, made), (true, expected) in zip(found, over(lambda model: model, validate), strict=True):
        assert loss == true
        assert made.keys() == expected.keys()
        assert all(torch.equal(x, expected[name]) for name, x in made.items())
    assert 0 < len(graphs) <= 3 * P  # before, between and after two layers' attention
    assert len(counters["graph_break"]) == 1, "torch traced into the ring"


def test_inductor(graphs: list[int]) -> None:
    """With torch's own code generator, whose rounding may differ by a few units."""
    found, true = over(lambda model: torch.compile(model)), over(lambda model: model)
    epsilon = torch.finfo(torch.float32).eps
    for (loss, made), (expected_loss, expected) in zip(found, true, strict=True):
        assert abs(loss - expected_loss) <= 8 * epsilon * abs(expected_loss)
        for name, x in made.items():
            assert (x - expected[name]).abs().max() <= 64 * epsilon * (1 + expected[name].abs().max())
