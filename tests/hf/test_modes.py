"""A transformers model over a ring is right under autocast, and generate() is refused inside the context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster, hf, zigzag
from ringlab.comm.ring import Ring
from ringlab.conformance.tolerance import FACTOR
from ringlab.errors import MaskError
from tests.hf.models import batch_of, build, llama

P, S = 2, 12
LAYOUT = zigzag(S, P)
Step = tuple[float, dict[str, Tensor]]


def step(ring: Ring) -> Step:
    """Return this rank's share of the loss under autocast, and its gradients."""
    model, batch = build(llama(), "ringlab"), batch_of(S)
    with hf.context(ring, LAYOUT) as context, torch.autocast("cpu", torch.bfloat16):
        loss = model(**hf.shard_batch(context, batch.input_ids, labels=batch.labels)).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def alone(dtype: torch.dtype = torch.float32, autocast: bool = False) -> Step:
    """Return the loss and the gradients on one process, by torch's own attention."""
    model, batch = build(llama(), "sdpa", dtype), batch_of(S)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(batch.input_ids, labels=batch.labels).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def test_autocast_is_as_exact_as_on_one_process() -> None:
    """Under autocast, a Llama's q and k are float32 and its v is bfloat16, because the rotary embedding is not cast.

    The test compares all gradients together: bfloat16 rounding errors are large, and a single gradient may pass by
    luck.
    """
    (_, true), (_, plain) = alone(torch.float64), alone(autocast=True)
    shares = [gradients for _, gradients in VirtualCluster(P, memory=False).run(step).results]
    assert all(x.dtype == torch.float32 for gradients in shares for x in gradients.values())
    found = {name: shares[0][name] + shares[1][name] for name in true}
    assert distance(found, true) <= FACTOR * distance(plain, true)
    assert distance(shares[0], true) > 5 * FACTOR * distance(plain, true)  # one rank's share alone is wrong


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(torch.cat([(one[name] - x).flatten() for name, x in other.items()]).norm())


def test_generate_is_refused_with_the_way_out() -> None:
    def program(ring: Ring) -> Any:
        ids = LAYOUT.shard(batch_of(S).input_ids, ring.rank, dim=1)
        with hf.context(ring, LAYOUT), pytest.raises(MaskError) as raised:
            build(llama(), "ringlab").eval().generate(ids, max_new_tokens=2, do_sample=False)
        return raised.value.remedy

    for remedy in VirtualCluster(P, memory=False).run(program).results:
        assert "generate outside of ringlab.hf.context" in remedy
