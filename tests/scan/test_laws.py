"""Linear attention over ranks equals the recurrence for any layout, scan, kind and documents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from ringlab import VirtualCluster, launch
from ringlab.comm.ring import Ring
from ringlab.conformance.kinds.scan_cases import attend_to, join
from ringlab.errors import BackendError
from ringlab.layout import contiguous, zigzag
from ringlab.scan import executor
from ringlab.scan.attention import linear_attention
from ringlab.scan.executor import Passage
from ringlab.scan.graph import Element, elements_of
from tests.scan.problems import Problem, problems, solve, wrong


@settings(max_examples=30)
@given(problems())
def test_any_scan_equals_the_oracle(drawn: tuple[Problem, str, int]) -> None:
    problem, scan, chunk = drawn
    assert not wrong(solve(problem, scan, chunk), problem)


BASE = Problem(contiguous(14, 4), K=2)
PACKED = Problem(contiguous(14, 4), documents=(3, 5, 6), K=2)
DECAY = Problem(zigzag(14, 3), "decay", K=2)


def adds_states(later: Passage, earlier: Passage) -> Passage:
    """A mutant that adds states without the later transition, as if there were no decay and no delta rule."""
    return Passage(earlier.transition, later.contribution + earlier.contribution)


def keeps_gradients_at_home(*arguments: Any, **other: Any) -> dict[int, Passage]:
    """A mutant whose backward gets no gradient of a state from later ranks."""
    found = executor.pass_states(*arguments, **other)
    if arguments[-1] == "state":
        return found
    return {turn: Passage(None, torch.zeros_like(each.contribution)) for turn, each in found.items()}


def forgets_documents(*arguments: Any) -> tuple[Element, ...]:
    """A mutant that keeps earlier documents in the state that leaves a rank, so later ranks read them."""
    return tuple(
        Element(each.rank, (slice(each.stretches[0].start, each.stretches[-1].stop),), each.fresh)
        for each in elements_of(*arguments)
    )


@pytest.mark.parametrize(
    ("place", "mutant", "problem"),
    [
        ("ringlab.scan.executor.after", adds_states, DECAY),
        ("ringlab.scan.program.pass_states", keeps_gradients_at_home, DECAY),
        ("ringlab.scan.arguments.elements_of", forgets_documents, PACKED),
    ],
)
def test_the_law_notices(place: str, mutant: Any, problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not wrong(solve(problem, "all-gather"), problem)
    monkeypatch.setattr(place, mutant)
    assert wrong(solve(problem, "all-gather"), problem)


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


@pytest.mark.parametrize("first", [1, 6])
def test_two_calls_are_one(first: int) -> None:
    """Two calls equal one, including the backward pass through the state between them."""
    problem = Problem(contiguous(11, 3))
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


def test_the_last_column_counts() -> None:
    """A column of ones in v gives Σ q·k, the normaliser of the first linear attentions."""
    layout = contiguous(9, 3)
    q, k = torch.rand(2, 1, 1, 9, 4).unbind()
    v = torch.cat([torch.randn(1, 1, 9, 2), torch.ones(1, 1, 9, 1)], dim=-1)

    def of_rank(ring: Ring) -> Tensor:
        return linear_attention(*layout.shard((q, k, v), ring.rank), ring=ring, layout=layout, scale=1.0)

    out = layout.unshard(VirtualCluster(3).run(of_rank).results)
    torch.testing.assert_close(out[..., -1], (q @ k.mT).tril().sum(-1))


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
    """Autocast gives the bits of a cast by hand, on virtual ranks and on processes."""
    plain = VirtualCluster(2, memory=False).run(inside_autocast, False).results
    for found in (VirtualCluster(2).run(inside_autocast, True), launch(inside_autocast, 2, True, threads=1)):
        for one, other in zip(found.results, plain, strict=True):
            assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(one, other, strict=True))
            assert [x.dtype for x in one[:3]] == [
                torch.bfloat16,
                torch.float32,
                torch.float32,
            ]  # out, state, dq
        assert not wrong(join(HALVES.layout, found.results), HALVES)


def test_float64_is_left_alone_by_autocast() -> None:
    def of_rank(ring: Ring, autocast: bool) -> tuple[Tensor | None, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return attend_to(ring, BASE.inputs(), BASE.layout, "relay", 4)

    one, other = (
        VirtualCluster(4, memory=False).run(of_rank, autocast).results for autocast in (True, False)
    )
    assert all(torch.equal(x, y) for a, b in zip(one, other, strict=True) for x, y in zip(a, b, strict=True))


def test_a_second_derivative_is_refused() -> None:
    layout, inputs = contiguous(4, 1), Problem(contiguous(4, 1)).inputs()

    def of_rank(ring: Ring) -> None:
        q = inputs.q.clone().requires_grad_()
        out = linear_attention(q, inputs.k, inputs.v, ring=ring, layout=layout)
        with pytest.raises(BackendError, match="create_graph"):
            torch.autograd.grad(out.sum(), q, create_graph=True)

    VirtualCluster(1).run(of_rank)
