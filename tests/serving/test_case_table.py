"""Every serving case is right on virtual ranks, and has the same bits and messages on processes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster, launch
from ringlab.comm.trace import Outcome
from tests.serving.problems import CASES, assert_case, serve_all
from tests.substrates.writes import Writes


@lru_cache(maxsize=1)
def on_virtual_ranks() -> Outcome:
    writes = Writes()
    outcome = VirtualCluster(3, memory=False).run(lambda ring: writes.watch(serve_all, ring))
    assert not writes.foreign, sorted(set(writes.foreign))
    return outcome


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_right_on_virtual_ranks(name: str) -> None:
    number = list(CASES).index(name)
    assert_case([results[number] for results in on_virtual_ranks().results], CASES[name])


def tensors_of(results: Any) -> list[Tensor]:
    """Return all tensors in nested results, in order."""
    if isinstance(results, Tensor):
        return [results]
    return [x for part in results for x in tensors_of(part)] if isinstance(results, (list, tuple)) else []


@pytest.mark.parametrize("transport", ["gloo", pytest.param("symmetric", marks=pytest.mark.thorough)])
def test_processes_have_the_same_bits_and_messages(transport: str) -> None:
    real, virtual = launch(serve_all, 3, transport=transport, memory=False), on_virtual_ranks()
    for mine, other in zip(real.results, virtual.results, strict=True):
        pairs = list(zip(tensors_of(mine), tensors_of(other), strict=True))
        assert len(pairs) >= 2 * len(CASES)
        assert all(torch.equal(a, b) for a, b in pairs)
    for rank in range(3):
        sent, expected = (
            sorted((e.index, e.tag, e.to, e.bytes_sent) for e in run.trace.exchanges(rank))
            for run in (real, virtual)
        )
        assert sent == expected
