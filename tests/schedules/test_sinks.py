"""Attention sinks are added exactly once, and add no bytes to messages and almost no memory.

tests/schedules/test_exact.py compares their results with the oracle.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster, ring_attention
from ringlab.blocks.blockwise import Blockwise
from ringlab.comm.ring import Ring
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import ring_traffic, ulysses_traffic
from ringlab.errors import RankFailedError
from ringlab.layout import Layout, zigzag
from ringlab.merge import Partial, sink_partial, with_sinks
from ringlab.schedules import block_schedule
from tests.laws.draw import Shape, tensors
from tests.schedules.problems import Problem, hold, run


def test_a_sink_is_merged_like_any_partial_and_one_of_minus_infinity_is_none() -> None:
    rows = Partial(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3))
    rows.lse[0, 1, 2], rows.out[0, 1, 2] = -torch.inf, 0.0
    whole = with_sinks(rows, torch.full((2,), -torch.inf))
    assert torch.equal(whole.out, rows.out) and torch.equal(whole.lse, rows.lse)
    found = block_schedule.sink_gradient(torch.full((2,), -torch.inf), rows.lse, torch.ones(1, 2, 3))
    assert torch.equal(found, torch.zeros(2))
    assert sink_partial(torch.tensor([1.0, 2.0]), rows).lse.unique().tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("block", "dtype"), [("native", torch.bfloat16), ("triton", torch.float32)], ids=str)
def test_lower_precisions(block: str, dtype: torch.dtype) -> None:
    hold(Problem(zigzag(16, 2), 4, 2, dtype=dtype, sinks=1.0), "ring", block)


SIZES = {"B": 2, "H": 4, "K": 2, "D": 4, "dtype": "float32"}


def test_sinks_send_nothing() -> None:
    """Sinks send no lse and no gradient of lse, under any schedule."""
    problem = Problem(zigzag(16, 2), 4, 2, B=2, dtype=torch.float32, sinks=1.0)
    formulas = {"ring": ring_traffic, "ulysses": ulysses_traffic}
    for schedule, formula in formulas.items():
        trace = run(problem, schedule, "native", False).trace
        expected = sum(
            formula(Attention(**SIZES), 16, 2, backward=back).total_bytes for back in (False, True)
        )
        assert {trace.bytes_sent(rank=rank) for rank in range(2)} == {expected}, schedule


def test_the_backward_of_native_stays_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks alone keep native's backward native; a gradient of lse moves it to blockwise."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("blockwise computes")

    monkeypatch.setattr(Blockwise, "backward", never)
    problem = Problem(zigzag(16, 2), 4, 2, dtype=torch.float32, sinks=1.0)
    for schedule in ("ring", "ulysses"):
        assert not list(run(problem, schedule, "native").trace.choices())
    with pytest.raises(RankFailedError, match="blockwise computes"):
        run(replace(problem, through_lse=True), "ring", "native")


def once(ring: Ring, shards: list[Any], layout: Layout, sinks: Tensor | None, schedule: str) -> None:
    q, k, v, dout = shards[ring.rank]
    leaves = [x.requires_grad_() for x in (q, k, v)] + (
        [] if sinks is None else [sinks.clone().requires_grad_()]
    )
    out = ring_attention(*leaves[:3], ring=ring, layout=layout, sinks=(*leaves, None)[3], schedule=schedule)
    torch.autograd.grad(out, leaves, dout)


def peak_bytes(sinks: Tensor | None, schedule: str) -> int:
    layout = zigzag(1024, 4)
    whole = tensors(Shape(1, 4, 4, 1024, 1024, 64), 0, torch.float32)
    shards = [layout.shard(whole, rank) for rank in range(4)]
    reports = VirtualCluster(4).run(once, shards, layout, sinks, schedule).memory
    return max(report.peak_bytes for report in reports)


def test_sinks_take_no_memory_but_some_numbers_a_row() -> None:
    """Sinks take at most four numbers a row and head; a second out would take 64."""
    rows = 4 * 256 * 4  # bytes of one number for each row and head
    assert peak_bytes(torch.zeros(4), "ring") - peak_bytes(None, "ring") <= 4 * rows


def test_sinks_that_change_before_backward_are_noticed() -> None:
    def program(ring: Ring) -> None:
        x, sinks = torch.zeros(1, 2, 8, 4, requires_grad=True), torch.zeros(2, requires_grad=True)
        out = ring_attention(x, x, x, ring=ring, layout=zigzag(8, 1), sinks=sinks)
        with torch.no_grad():
            sinks.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    VirtualCluster(1).run(program)
