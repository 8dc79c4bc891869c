"""Torch's modes around a model of transformers over a ring: autocast, torch.compile; and generate() is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from ringlab import VirtualCluster, hf, launch, zigzag
from ringlab.comm.ring import Ring
from ringlab.conformance.tolerance import FACTOR
from ringlab.errors import MaskError
from tests.hf.models import batch_of, build, llama

P, S = 2, 12
LAYOUT = zigzag(S, P)
Step = tuple[float, dict[str, Tensor]]


def step(
    ring: Ring, compiled: bool = False, autocast: bool = False, config: LlamaConfig | None = None
) -> Step:
    """This rank's share of the loss, and its gradients."""
    model, batch = build(config or llama(), "ringlab"), batch_of(S)
    called = torch.compile(model, backend="eager") if compiled else model
    with hf.context(ring, LAYOUT) as context, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = called(**hf.shard_batch(context, batch.input_ids, labels=batch.labels)).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def alone(dtype: torch.dtype = torch.float32, autocast: bool = False) -> Step:
    """The loss and the gradients on one process, by torch's own attention."""
    model, batch = build(llama(), "sdpa", dtype), batch_of(S)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(batch.input_ids, labels=batch.labels).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def test_autocast_is_as_exact_as_on_one_process() -> None:
    """In a Llama q and k are float32 there and v is bfloat16, because rotary embedding is not cast."""
    _, true = alone(torch.float64)
    _, plain = alone(autocast=True)
    shares = VirtualCluster(P, memory=False).run(step, False, True).results
    found = {name: sum(gradients[name] for _, gradients in shares) for name in true}
    for name, best in true.items():
        assert all(gradients[name].dtype == torch.float32 for _, gradients in shares)
        size = float(best.abs().max())
        allowed = FACTOR * float((plain[name] - best).abs().max()) + torch.finfo(torch.bfloat16).eps * size
        assert float((found[name] - best).abs().max()) <= allowed, name  # type: ignore[union-attr]


def eager_and_compiled(ring: Ring) -> tuple[Step, Step]:
    one = llama(num_hidden_layers=1)
    return step(ring, config=one), step(ring, compiled=True, config=one)


def test_a_compiled_model_has_the_same_bits() -> None:
    """On processes, since torch cannot trace the checks of shapes that tests install in this one."""
    for (loss, plain), (compiled, found) in launch(
        eager_and_compiled, P, memory=False, timeout=300.0
    ).results:
        assert compiled == loss
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], x) for name, x in plain.items())


@pytest.mark.parametrize("whole", [True, False], ids=["a whole prompt", "a shard"])
def test_generate_is_refused_with_the_way_out(whole: bool) -> None:
    def program(ring: Ring) -> Any:
        ids = batch_of(S).input_ids if whole else LAYOUT.shard(batch_of(S).input_ids, ring.rank, dim=1)
        with hf.context(ring, LAYOUT), pytest.raises(MaskError) as raised:
            build(llama(), "ringlab").eval().generate(ids, max_new_tokens=2, do_sample=False)
        return raised.value.remedy

    for remedy in VirtualCluster(P, memory=False).run(program).results:
        assert "generate outside of ringlab.hf.context" in remedy
