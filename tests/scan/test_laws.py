"""Linear attention over ranks is the recurrence: any layout of stretches, scan, kind and documents; and mutants that are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from ringlab import VirtualCluster, launch
from ringlab.comm.ring import Ring
from ringlab.conformance.scan_cases import attend_to, join
from ringlab.errors import BackendError
from ringlab.layout import contiguous, zigzag
from ringlab.scan import attention, passing, program, stretch
from ringlab.scan.arguments import Call
from ringlab.scan.attention import linear_attention
from ringlab.scan.chain import SCANS, Element, chain
from ringlab.scan.chunk import Chunk, Tokens
from ringlab.scan.passing import Passage
from tests.scan.problems import Problem, problems, solve, wrong


@settings(max_examples=30)
@given(problems())
def test_any_scan_equals_the_oracle(drawn: tuple[Problem, str, int]) -> None:
    problem, scan, chunk = drawn
    assert not wrong(solve(problem, scan, chunk), problem)


BASE = Problem(contiguous(14, 4), K=2)
PACKED = Problem(contiguous(14, 4), documents=(3, 5, 6), K=2)
DECAY = Problem(zigzag(14, 3), "decay", K=2)
IN_BFLOAT16 = Problem(contiguous(14, 4), "plain", dtype=torch.bfloat16, initial=False)


def reads_the_decay_of_the_first_head(
    tokens: Tokens, dout: Tensor, like: Passage, length: int, scale: float
) -> Passage:
    """Backward, what a rank's tokens do to a gradient, by the decay of head 0: flash-linear-attention 1115."""
    right = stretch_passage_back(tokens, dout, like, length, scale)
    decay = None if tokens.decay is None else tokens.decay[:, :1].expand_as(tokens.decay)
    other = stretch_passage_back(tokens._replace(decay=decay), dout, like, length, scale)
    return right._replace(transition=other.transition)


stretch_passage_back = stretch.passage_back


def transposes_nothing(tokens: Tokens, dout: Tensor, like: Passage, length: int, scale: float) -> Passage:
    found = stretch_passage_back(tokens, dout, like, length, scale)
    return found if found.transition is None else found._replace(transition=found.transition.mT)


def keeps_gradients_at_home(*arguments: Any, **other: Any) -> dict[int, Passage]:
    """Backward, no gradient of a state arrives from later ranks."""
    found = passing.pass_states(*arguments, **other)
    if arguments[-1] == "state":
        return found
    return {turn: Passage(None, torch.zeros_like(each.contribution)) for turn, each in found.items()}


def adds_states(later: Passage, earlier: Passage) -> Passage:
    """As without decay and delta rule: what is left of the earlier state is forgotten."""
    return Passage(earlier.transition, later.contribution + earlier.contribution)


def composes_in_the_wrong_order(later: Passage, earlier: Passage) -> Passage:
    if later.transition is None or earlier.transition is None:
        return passing_after(later, earlier)
    return passing_after(later, earlier)._replace(transition=earlier.transition @ later.transition)


passing_after = passing.after


def forgets_documents_that_begin_with_a_rank(*arguments: Any) -> tuple[Element, ...]:
    return tuple(Element(each.rank, each.stretches, False) for each in chain(*arguments))


def resets_at_documents_inside_a_rank_only_for_outputs(*arguments: Any) -> tuple[Element, ...]:
    """The state that leaves a rank still has the documents before the last one: other ranks read across the border."""
    return tuple(
        Element(each.rank, (slice(each.stretches[0].start, each.stretches[-1].stop),), each.fresh)
        for each in chain(*arguments)
    )


def sends_bfloat16(self: Passage) -> tuple[Tensor, ...]:
    parts = (self.transition, self.contribution)
    return tuple(x.bfloat16().to(x.dtype) for x in parts if x is not None)


def decays_too_late(tokens: Tokens) -> Chunk:
    """A token's decay reaches what it writes, too."""
    right = chunk_of(tokens)
    decay = torch.zeros_like(tokens.k[..., 0]) if tokens.decay is None else tokens.decay
    return Chunk(right.tokens, right.between * decay.exp()[..., None, :], right.since, right.coupling)


chunk_of = Chunk.of


def gives_every_rank_the_initial_gradient(*arguments: Any) -> Any:
    found, dinitial = program_backward(*arguments)
    call: Call = arguments[0]
    return found, call.ring.comm.all_reduce(dinitial)


program_backward = program.backward


def drops_the_last_gradient(comm: Any, dstate: Tensor, owner: int) -> Tensor:
    """The gradients of the last state on other ranks are lost."""
    return dstate if comm.rank == owner else torch.zeros_like(dstate)


MUTANTS: dict[str, tuple[Any, str, Any, Problem]] = {
    "backward reads the decay of the first head": (
        program.stretch, "passage_back", reads_the_decay_of_the_first_head, BASE),
    "transitions are not transposed": (program.stretch, "passage_back", transposes_nothing, BASE),
    "gradients of states stay at home": (program, "pass_states", keeps_gradients_at_home, DECAY),
    "states are added": (passing, "after", adds_states, DECAY),
    "transitions in the wrong order": (passing, "after", composes_in_the_wrong_order, BASE),
    "documents that begin with a rank": (
        attention, "check_arguments", None, Problem(contiguous(12, 4), documents=(3, 3, 6))),
    "documents inside a rank": (attention, "check_arguments", None, PACKED),
    "states in bfloat16": (Passage, "tensors", property(sends_bfloat16), IN_BFLOAT16),
    "decay too late": (Chunk, "of", decays_too_late, DECAY),
    "the initial gradient on every rank": (attention, "backward", gives_every_rank_the_initial_gradient, BASE),
    "the last gradient of one rank only": (program, "_collect", drops_the_last_gradient, BASE),
}  # fmt: skip
CHAINS = {
    "documents that begin with a rank": forgets_documents_that_begin_with_a_rank,
    "documents inside a rank": resets_at_documents_inside_a_rank_only_for_outputs,
}


def plant(name: str, monkeypatch: pytest.MonkeyPatch) -> Problem:
    place, function, mutant, problem = MUTANTS[name]
    if name in CHAINS:
        monkeypatch.setattr("ringlab.scan.arguments.chain", CHAINS[name])
    else:
        monkeypatch.setattr(place, function, mutant)
    return problem


@pytest.mark.parametrize("name", MUTANTS)
def test_the_law_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = MUTANTS[name][-1]
    assert not wrong(solve(problem, "all-gather"), problem)
    plant(name, monkeypatch)
    assert wrong(solve(problem, "all-gather"), problem)


def test_gradients_that_are_right_on_the_last_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward is right, and so is the last rank's backward: only a comparison of every rank's gradients finds it."""
    inputs, layout = BASE.inputs(), BASE.layout
    cluster = VirtualCluster(layout.P, memory=False)
    right = cluster.run(attend_to, inputs, layout, "all-gather", 4).results
    plant("backward reads the decay of the first head", monkeypatch)
    found = cluster.run(attend_to, inputs, layout, "all-gather", 4).results
    same = [
        all(torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in zip(right, found, strict=True)
    ]
    assert same == [False, False, False, True]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(right, found, strict=True))
    assert set(wrong(join(layout, found), BASE)) == {"dk", "dv", "ddecay", "dbeta", "dinitial"}


def in_two_calls(ring: Ring, problem: Problem, first: int) -> tuple[Tensor, ...]:
    """A prompt in two calls, the second of which goes on from the state of the first."""
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
    """Also backward, through the state between them: conventions of initial and last states fit each other."""
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


def test_chunks_and_scans_change_nothing_but_roundings() -> None:
    results = [solve(BASE, scan, chunk) for scan, chunk in zip(SCANS, (1, 3, 64), strict=True)]
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
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
    """The normaliser of the first linear attentions, Σ q·k, is one more column of v, of ones."""
    layout = contiguous(9, 3)
    q, k = torch.rand(2, 1, 1, 9, 4).unbind()
    v = torch.cat([torch.randn(1, 1, 9, 2), torch.ones(1, 1, 9, 1)], dim=-1)

    def of_rank(ring: Ring) -> Tensor:
        return linear_attention(*layout.shard((q, k, v), ring.rank), ring=ring, layout=layout, scale=1.0)

    out = layout.unshard(VirtualCluster(3).run(of_rank).results)
    torch.testing.assert_close(out[..., -1], (q @ k.mT).tril().sum(-1))


def test_a_decay_for_each_channel_is_one_for_each_head_of_one_channel() -> None:
    """Gated linear attention, by hand, and the way around that docs/guide/scan.md tells of."""
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
    """A forward and its backward, both inside autocast, with q and v in float32, or both outside in bfloat16."""
    inputs = HALVES.inputs()
    if autocast:
        inputs = replace(inputs, q=inputs.q.float(), v=inputs.v.float())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return attend_to(ring, inputs, HALVES.layout, "all-gather", 4)


def test_autocast_casts_as_by_hand_and_rounds_nothing_else() -> None:
    """On processes, too: there the program's own thread computes, inside autocast, and on virtual ranks a worker outside it."""
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
