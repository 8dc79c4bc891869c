"""For sequences in groups of ranks, attention equals the oracle's, and a training step equals one process's.

The sent bytes equal the formula, and a rank's memory is at most that of a ring that fills its capacity.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor

from ringlab import VirtualCluster, launch
from ringlab.comm.ring import Ring
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.cost.sizes import Attention
from ringlab.errors import AgreementError, WorldSizeError
from ringlab.packing import Assignment, GroupedContext, Placement, assign
from ringlab.packing.groups import sent_bytes
from tests.packing.assignments import COSTS, one_process, problems, step
from tests.packing.test_training import ROUNDINGS

NESTED = Assignment(
    (37, 3, 18, 0, 1, 22), 4, 40,
    ((Placement(0, 37, 0, 4), Placement(5, 22, 2, 2), Placement(2, 18, 0, 2), Placement(1, 3, 1, 1), Placement(4, 1, 3, 1)),
     (Placement(3, 0, 0, 1),)),
)  # fmt: skip
"""Groups of four, two and one, with a sequence of one token, an empty sequence and an empty micro-batch."""
SIZES = {"H": 8, "K": 4, "D": 16}


def whole(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return q, k, v and dout of the first micro-batch."""
    draw, S = torch.Generator().manual_seed(3), NESTED.packing(0).length
    heads = (SIZES["H"], SIZES["K"], SIZES["K"], SIZES["H"])
    return tuple(
        torch.randn(1, n, S, SIZES["D"], generator=draw, dtype=torch.float64).to(dtype) for n in heads
    )


def attend(
    ring: Ring, dtype: torch.dtype, schedule: str = "ring", window: int | None = None, block: str = "naive"
) -> tuple[Tensor, ...]:
    """Return this rank's rows of out, and its dq, dk and dv."""
    context = GroupedContext.of(ring, NESTED, 0, schedule=schedule, window=window, block=block)
    *qkv, dout = (context.layout.shard(x, ring.rank) for x in whole(dtype))
    q, k, v = (x.requires_grad_() for x in qkv)
    out = context.attend(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


@lru_cache(maxsize=8)
def allowed(dtype: torch.dtype, window: int | None) -> tuple[Results, dict[str, float]]:
    mask, tensors = NESTED.packing(0).mask(window=window), whole(dtype)
    true = truth(*tensors, mask=mask)
    return true, bounds(*tensors, mask=mask, true=true)


def beyond(shards: list[tuple[Tensor, ...]], dtype: torch.dtype, window: int | None = None) -> dict[str, Any]:
    true, most = allowed(dtype, window)
    out, *gradients = (NESTED.layout(0).unshard(part) for part in zip(*shards, strict=True))
    found = errors(Results(out, torch.from_numpy(np.asarray(true.lse)), *gradients), true)
    return {name: (found[name], most[name]) for name in NAMES if not found[name] <= most[name]}


DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("schedule", "dtype"), zip(["ring", "allgather", "ulysses"], DTYPES, strict=True))
def test_attention_is_the_oracles(dtype: torch.dtype, schedule: str) -> None:
    for window in (None, 5):
        run = VirtualCluster(4, memory=False).run(attend, dtype, schedule, window)
        assert beyond(run.results, dtype, window) == {}


def jobs(ring: Ring) -> tuple[list[tuple[Tensor, ...]], Any]:
    return [attend(ring, dtype) for dtype in DTYPES], step(ring, NESTED)


@pytest.mark.thorough
def test_processes() -> None:
    """On four gloo processes attention is within the bounds, and a step has the bits of virtual ranks."""
    attentions, steps = zip(*launch(jobs, 4, threads=1).results, strict=True)
    for dtype, shards in zip(DTYPES, zip(*attentions, strict=True), strict=True):
        assert beyond(list(shards), dtype) == {}
    for (loss, gradients), (virtual, expected) in zip(
        steps, VirtualCluster(4, memory=False).run(step, NESTED).results, strict=True
    ):
        assert loss == virtual and all(torch.equal(gradients[name], x) for name, x in expected.items())


def assert_is_one_process(assignment: Assignment) -> None:
    loss, gradients = one_process(assignment.lengths)
    for shared_loss, shared in VirtualCluster(assignment.P, memory=False).run(step, assignment).results:
        assert abs(shared_loss - loss) <= ROUNDINGS * (1 + abs(loss))
        for name, gradient in gradients.items():
            assert (shared[name] - gradient).abs().max() <= ROUNDINGS * (1 + gradient.abs().max()), name


def test_a_step_is_that_of_one_process() -> None:
    assert_is_one_process(NESTED)


@settings(max_examples=10)
@given(drawn=problems(most=6))
def test_a_step_on_what_is_assigned_is_that_of_one_process(drawn: tuple[list[int], int, int]) -> None:
    lengths, P, _ = drawn
    lengths = [n // 12 for n in lengths]
    assume(P <= 4 and max(lengths) > 1)
    made = assign(lengths, P, 2 + max(lengths) // P + 8, COSTS)
    assert_is_one_process(made)


def test_what_is_sent_is_what_the_formula_says() -> None:
    """The bytes and rounds equal the formula: P − 1 hops forward, 2P − 1 backward, for each sequence."""
    trace = VirtualCluster(4).run(attend, torch.float32).trace
    sizes = Attention(**SIZES, dtype="float32")
    for rank in range(4):
        expected = sum(sent_bytes(NESTED, 0, rank, sizes, backward=back) for back in (False, True))
        assert trace.bytes_sent(rank) == expected
        degrees = [each.degree for each in NESTED.micro_batches[0] if rank in each.ranks]
        assert len(trace.exchanges(rank)) == sum((d - 1) + (2 * d - 1) * (d > 1) for d in degrees)
    static = Assignment(
        NESTED.lengths, 4, 60, (tuple(Placement(i, n, 0, 4) for i, n in enumerate(NESTED.lengths)),)
    )
    assert sum(sent_bytes(NESTED, 0, r, sizes) for r in range(4)) < sum(
        sent_bytes(static, 0, r, sizes) for r in range(4)
    )


def peak(assignment: Assignment) -> int:
    """Return the most bytes that any rank holds in attention, forward and backward."""

    def program(ring: Ring) -> None:
        context = GroupedContext.of(ring, assignment, 0, block="native")
        L = len(context.positions)
        q, k, v = (torch.ones(1, heads, L, 64).requires_grad_() for heads in (4, 2, 2))
        torch.autograd.grad(context.attend(q, k, v).sum(), (q, k, v))

    return max(report.peak_bytes for report in VirtualCluster(assignment.P).run(program).memory)


def test_memory_is_that_of_the_capacity_at_most() -> None:
    """A rank needs at most the memory of a ring of one sequence that fills the capacity of every rank."""
    capacity, P = 512, 4
    full = peak(Assignment((capacity * P,), P, capacity, ((Placement(0, capacity * P, 0, P),),)))
    mixed = assign([1500, 130, 110, 120, 125], P, capacity, COSTS)
    assert len({each.degree for each in mixed.micro_batches[0]}) > 1
    filled = max(mixed.tokens(0)) / capacity
    assert 0.5 * filled * full < peak(mixed) <= full


def another_assignment(ring: Ring) -> None:
    """Make assignments whose layouts have equal names, but whose groups differ on one rank."""
    swapped = Assignment((8, 8), 2, 8, ((Placement(1, 8, 1, 1), Placement(0, 8, 0, 1)),))
    straight = Assignment((8, 8), 2, 8, ((Placement(0, 8, 0, 1), Placement(1, 8, 1, 1)),))
    GroupedContext.of(ring, swapped if ring.rank else straight, 0)


def test_different_assignments_are_refused_on_all_ranks() -> None:
    with pytest.raises(AgreementError):
        VirtualCluster(2).run(another_assignment)
    with pytest.raises(WorldSizeError, match="a layout for 2 ranks"):
        VirtualCluster(2).run(lambda ring: GroupedContext.of(ring, NESTED, 0))
