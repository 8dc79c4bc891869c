"""A step of a compiled model over a ring, for processes, because the tests' shape checks break tracing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ringlab import attention, ring_attention, zigzag
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from tests.trainer.model import Gradients, Model, gradients, share_over


@dataclass(frozen=True)
class Compiled:
    """A step's loss and gradients, the number of graphs, and torch's reasons to end a graph."""

    loss: float
    gradients: Gradients
    graphs: int = 0
    breaks: tuple[str, ...] = ()


def steps(ring: Ring) -> dict[str, Compiled]:
    """Return the results of a step, uncompiled, with and without validation, and of two compiled calls."""
    found = {
        "plain": step(ring, lambda model: model),
        "validate": traced(partial(step, ring, validate=True)),
        "not validated": traced(partial(step, ring, validate=False)),
        "a call": traced(partial(call_on_one_rank, ring)),
    }
    attention._outside_graphs = attention._attend
    return found | {"traced into": traced(partial(call_on_one_rank, ring))}


def call_on_one_rank(ring: Ring, compiler: Callable[[Any], Any]) -> Compiled:
    one, layout, x = Ring(SubGroup(ring.comm, [ring.rank])), zigzag(8, 1), torch.ones(1, 2, 8, 4)
    call = compiler(lambda x: ring_attention(2 * x, x, x, ring=one, layout=layout) + 1)
    return Compiled(call(x).sum().item(), {})


def step(ring: Ring, compiler: Callable[[Any], Any], validate: bool = True) -> Compiled:
    model = Model()
    loss = share_over(ring, compiler(model), validate=validate)
    loss.backward()
    return Compiled(loss.item(), gradients(model))


def traced(program: Callable[..., Compiled]) -> Compiled:
    """Return the program's result under a compiler that only records graphs."""
    from torch._dynamo.utils import counters  # imported late, because it loads the compiler

    torch._dynamo.reset()
    counters.clear()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    made = program(compiler=partial(torch.compile, backend=backend))
    return replace(made, graphs=len(graphs), breaks=tuple(counters["graph_break"]))
