"""Linear attention over ranks equals the oracle's for any layout, scan, kind and documents."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from ringlab import VirtualCluster, launch
from ringlab.comm.ring import Ring
from ringlab.conformance.kinds.scan_cases import AXES, Case, attend, attend_to, covering, join, problem
from ringlab.conformance.kinds.scan_tolerance import errors
from ringlab.errors import BackendError
from ringlab.layout import contiguous
from ringlab.merge import state_dtype
from ringlab.scan.attention import linear_attention
from ringlab.scan.graph import SCANS
from tests.scan.problems import Problem, problems, solve, wrong


@lru_cache(maxsize=128)
def on_virtual_ranks(case: Case, scan: str) -> list[tuple[Tensor | None, ...]]:
    return VirtualCluster(case.P, memory=False).run(attend, case, scan).results


def test_the_table_covers_every_pair() -> None:
    cases = covering()
    for a, b in itertools.combinations(AXES, 2):
        met = {(getattr(case, a), getattr(case, b)) for case in cases}
        assert met == set(itertools.product(AXES[a], AXES[b]))
    assert len(cases) == len(set(cases))
    assert any(case.S < case.P for case in cases)


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("case", covering(), ids=str)
def test_virtual_ranks(case: Case, scan: str) -> None:
    shards, dtype = on_virtual_ranks(case, scan), getattr(torch, case.dtype)
    results = join(case.make_layout(), shards)
    assert results.out.dtype == results.dq.dtype == results.dv.dtype == dtype
    assert results.state.dtype == state_dtype(dtype)
    assert all(torch.equal(shards[0][1], state) for _, state, *_ in shards), (
        "ranks have different last states"
    )
    expected = problem(case)
    measured = errors(results, expected.true)
    beyond = {
        name: (error, expected.bounds[name])
        for name, error in measured.items()
        if not error <= expected.bounds[name]
    }
    assert not beyond, f"(error, allowed) {beyond}"


Job = tuple[Case, str]


def attend_all(ring: Ring, jobs: list[Job]) -> list[tuple[Tensor | None, ...]]:
    return [attend(ring, *job) for job in jobs]


def test_processes_give_the_bits_of_virtual_ranks() -> None:
    jobs = [(case, scan) for case in covering() if case.P == 3 for scan in SCANS]
    assert len(jobs) >= 9
    outcome = launch(attend_all, 3, jobs, threads=1)
    for job, shards in zip(jobs, zip(*outcome.results, strict=True), strict=True):
        for one, other in zip(shards, on_virtual_ranks(*job), strict=True):
            for x, y in zip(one, other, strict=True):
                assert (x is None and y is None) or torch.equal(x, y), job


@settings(max_examples=30)
@given(problems())
def test_any_scan_equals_the_oracle(drawn: tuple[Problem, str, int]) -> None:
    any_problem, scan, chunk = drawn
    assert not wrong(solve(any_problem, scan, chunk), any_problem)


def in_two_calls(ring: Ring, problem: Problem, first: int) -> tuple[Tensor, ...]:
    """Run a prompt in two calls, the second of which continues from the state of the first."""
    inputs, P = problem.inputs(), ring.world_size
    layouts = contiguous(first, P), contiguous(problem.layout.S - first, P)
    state, results, leaves = inputs.initial, [], []
    assert state is not None
    start = state = state.clone().requires_grad_()
    for layout, rows in zip(layouts, (slice(0, first), slice(first, None)), strict=True):
        q, k, v = (layout.shard(x[:, :, rows], ring.rank) for x in (inputs.q, inputs.k, inputs.v))
        decay, beta = (layout.shard(x[:, :, rows], ring.rank, dim=-1) for x in (inputs.decay, inputs.beta))
        leaves.append([x.requires_grad_() for x in (q, k, v, decay, beta)])
        out, state = linear_attention(
            q, k, v, ring=ring, layout=layout, decay=decay, beta=beta, initial_state=state, return_state=True
        )
        results.append((out, layout.shard(inputs.dout[:, :, rows], ring.rank)))
    outs, douts = zip(*results, strict=True)
    found = torch.autograd.grad((*outs, state), [*leaves[0], *leaves[1], start], (*douts, inputs.dstate / P))
    return *(x.detach() for x in (*outs, state)), *found


def test_two_calls_are_one() -> None:
    """Two calls equal one, including the backward pass through the state between them."""
    problem, first = Problem(contiguous(11, 3)), 6
    shards = list(
        zip(*VirtualCluster(3, memory=False).run(in_two_calls, problem, first).results, strict=True)
    )
    whole = solve(problem, "relay")
    one, two = contiguous(first, 3), contiguous(11 - first, 3)

    def joined(index: int, other: int, dim: int) -> Tensor:
        return torch.cat([one.unshard(shards[index], dim), two.unshard(shards[other], dim)], dim=2)

    found = [joined(0, 1, -2), shards[2][0], *(joined(3 + n, 8 + n, -2 if n < 3 else -1) for n in range(5))]
    for x, y in zip([*found, torch.stack(shards[13]).sum(0)], whole, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def test_a_document_does_not_see_a_nan_of_another() -> None:
    problem = Problem(contiguous(12, 3), documents=(5, 7), initial=False)
    inputs, layout = problem.inputs(), problem.layout
    inputs.v[:, :, 2] = inputs.k[:, :, 4] = torch.nan
    run = VirtualCluster(3, memory=False).run
    found = join(layout, run(attend_to, inputs, layout, "all-gather", 3).results)
    for x in found[:5]:
        assert x.isfinite().all() if x is found.state else x[:, :, 5:].isfinite().all()
    assert found.out[:, :, 2:5].isnan().all()


def test_a_decay_for_each_channel_is_one_for_each_head_of_one_channel() -> None:
    """A decay for each channel is the same as one head for each channel, as docs/guide/scan.md explains."""
    layout, (B, H, S, D, Dv) = contiguous(11, 3), (1, 2, 11, 3, 4)
    q, k, decay = torch.randn(3, B, H, S, D, dtype=torch.float64).unbind()
    v, decay = torch.randn(B, H, S, Dv, dtype=torch.float64), -decay.abs()
    state, expected = torch.zeros(B, H, D, Dv, dtype=torch.float64), []
    for t in range(S):
        state = decay[:, :, t, :, None].exp() * state + k[:, :, t, :, None] * v[:, :, t, None]
        expected.append((q[:, :, t, None] @ state) * D**-0.5)

    def channels(x: Tensor) -> Tensor:
        return x.mT.flatten(1, 2)  # (B, H · D, S)

    def of_rank(ring: Ring) -> Tensor:
        tokens = channels(q)[..., None], channels(k)[..., None], v.repeat_interleave(D, dim=1)
        own = layout.shard(tokens, ring.rank)
        gate = layout.shard(channels(decay), ring.rank, dim=-1)
        out = linear_attention(*own, ring=ring, layout=layout, decay=gate, scale=D**-0.5)
        return out.unflatten(1, (H, D)).sum(2)

    found = layout.unshard(VirtualCluster(3, memory=False).run(of_rank).results)
    torch.testing.assert_close(found, torch.cat(expected, dim=2), rtol=1e-11, atol=1e-11)


HALVES = Problem(contiguous(8, 2), dtype=torch.bfloat16)


def inside_autocast(ring: Ring, autocast: bool) -> tuple[Tensor | None, ...]:
    """Run forward and backward inside autocast with q and v in float32, or outside in bfloat16."""
    inputs = HALVES.inputs()
    if autocast:
        inputs = replace(inputs, q=inputs.q.float(), v=inputs.v.float())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return attend_to(ring, inputs, HALVES.layout, "all-gather", 4)


def test_autocast_casts_as_by_hand_and_rounds_nothing_else() -> None:
    """Autocast gives the bits of a cast by hand, on processes as on virtual ranks."""
    plain = VirtualCluster(2, memory=False).run(inside_autocast, False).results
    found = launch(inside_autocast, 2, True, threads=1).results
    for one, other in zip(found, plain, strict=True):
        assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(one, other, strict=True))
        assert [x.dtype for x in one[:3]] == [torch.bfloat16, torch.float32, torch.float32]  # out, state, dq
    assert not wrong(join(HALVES.layout, found), HALVES)


def test_a_second_derivative_is_refused() -> None:
    layout, inputs = contiguous(4, 1), Problem(contiguous(4, 1)).inputs()

    def of_rank(ring: Ring) -> None:
        q = inputs.q.clone().requires_grad_()
        out = linear_attention(q, inputs.k, inputs.v, ring=ring, layout=layout)
        with pytest.raises(BackendError, match="create_graph"):
            torch.autograd.grad(out.sum(), q, create_graph=True)

    VirtualCluster(1).run(of_rank)
