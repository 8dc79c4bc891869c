"""The program of one rank in a call of linear attention, forward and backward.

Forward: compute the passages of the rank's own stretches, pass states, and compute the outputs from the
states that enter.

Backward: the same steps from the last token to the first. The gradient of the state passes back through
transposed transitions, and the gradients of the outputs are added on the way.
"""

from __future__ import annotations

import torch

from ringlab.comm.protocol import Comm
from ringlab.merge import state_dtype
from ringlab.scan import local_scan
from ringlab.scan.arguments import ScanCall
from ringlab.scan.chunk import TokenGradients, Tokens
from ringlab.scan.executor import Passage, pass_states
from ringlab.scan.graph import plan_scan
from ringlab.types import State, Values


def forward(call: ScanCall, tokens: Tokens, initial: State | None) -> tuple[Values, State, list[State]]:
    """Return this rank's outputs, the last state, and the states that enter this rank's elements.

    The last state is meaningful only if the call asks for it.
    """
    comm, elements, like = call.ring.comm, call.elements, like_passages(tokens)
    zeros = torch.zeros_like(like.contribution)
    initial = zeros if initial is None else initial.detach().to(zeros.dtype)

    def passage_of(number: int) -> Passage:
        element = elements[number]
        wanted = like._replace(transition=None) if element.forgets else like
        part = tokens.rows(element.stretches[-1])
        return comm.compute("passage", local_scan.passage, part, wanted, call.chunk)

    known = {
        number: Passage(None, zeros if element.fresh else initial)
        for number, element in call.own
        if element.fresh or number == 0
    }
    plan = plan_scan(call.scan, elements)
    entering = pass_states(comm, plan, known, passage_of, like, "state")
    out, last = torch.empty_like(tokens.v), initial if not elements else zeros
    for number, element in call.own:
        state = entering[number].contribution
        for rows in element.stretches:
            part = tokens.rows(rows)
            out[..., rows, :], state = comm.compute(
                "attend", local_scan.attend, part, state, call.chunk, call.scale
            )
            if number == len(elements) - 1:
                last = state
            state = zeros
    if call.return_state and elements:
        last = _share(comm, last, elements[-1].rank)
    return out, last.clone(), [entering[number].contribution for number, _ in call.own]


def backward(
    call: ScanCall, tokens: Tokens, entering: list[State], dout: Values, dstate: State | None
) -> tuple[TokenGradients, State]:
    """Return the gradients of this rank's tokens, and this rank's part of the initial state's gradient."""
    comm, elements, like = call.ring.comm, call.elements, like_passages(tokens)
    zeros, count = torch.zeros_like(like.contribution), len(elements)
    dlast = zeros if dstate is None else dstate.to(zeros.dtype)
    if call.return_state and elements:
        dlast = _collect(comm, dlast, elements[-1].rank)

    def passage_of(turn: int) -> Passage:
        element = elements[count - 1 - turn]
        wanted = like._replace(transition=None) if element.forgets else like
        rows = element.stretches[0]
        arguments = tokens.rows(rows), dout[..., rows, :], wanted, call.chunk, call.scale
        return comm.compute("passage back", local_scan.passage_back, *arguments)

    known = {
        count - 1 - number: Passage(None, dlast if number == count - 1 else zeros)
        for number, _ in call.own
        if number == count - 1 or elements[number + 1].fresh
    }
    plan = plan_scan(call.scan, elements, backward=True)
    leaving = pass_states(comm, plan, known, passage_of, like, "dstate")
    found = _empty_gradients(tokens)
    dinitial = dlast if not elements else zeros
    for (number, element), state in zip(call.own, entering, strict=True):
        dleft = leaving[count - 1 - number].contribution
        for rows in reversed(element.stretches):
            first = rows == element.stretches[0]
            arguments = tokens.rows(rows), state if first else zeros, dout[..., rows, :], dleft
            of_part, dentered = comm.compute(
                "differentiate", local_scan.gradients, *arguments, call.chunk, call.scale
            )
            _store(found, rows, of_part)
            dleft = zeros
        if number == 0 and not element.fresh:
            dinitial = dentered
    return found, dinitial


def like_passages(tokens: Tokens) -> Passage:
    """Return a passage with the shapes, dtype and device of the messages. Its numbers have no meaning."""
    (B, H, _, Dv), D = tokens.v.shape, tokens.q.shape[-1]
    side = 1 if tokens.beta is None else D
    one = torch.empty(1, dtype=state_dtype(tokens.q.dtype), device=tokens.q.device)
    return Passage(one.expand(B, H, side, side), one.expand(B, H, D, Dv))


def _empty_gradients(tokens: Tokens) -> TokenGradients:
    gates = torch.empty(tokens.v.shape[:3], dtype=state_dtype(tokens.q.dtype), device=tokens.v.device)
    ddecay = torch.empty_like(gates if tokens.decay is None else tokens.decay)
    dbeta = None if tokens.beta is None else torch.empty_like(tokens.beta)
    dq, dk, dv = (torch.empty_like(x) for x in (tokens.q, tokens.k, tokens.v))
    return TokenGradients(dq, dk, dv, ddecay, dbeta)


def _store(found: TokenGradients, rows: slice, part: TokenGradients) -> None:
    """Write the gradients of some rows to their places.

    The gradients of q and k are summed over the heads of v that share a head of q and k.
    """
    for whole, x in zip(found[:3], part[:3], strict=True):
        whole[..., rows, :] = x.unflatten(1, (whole.shape[1], -1)).sum(2)
    found.ddecay[..., rows] = part.ddecay
    if found.dbeta is not None and part.dbeta is not None:
        found.dbeta[..., rows] = part.dbeta


def _share(comm: Comm, state: State, owner: int) -> State:
    """Return the state of rank `owner`, on every rank."""
    if comm.rank != owner:
        into = torch.empty(state.shape, dtype=state.dtype, device=state.device)
        return comm.exchange(receive=(into,), source=owner, tag="last state").wait()[0]
    others = [rank for rank in range(comm.world_size) if rank != owner]
    works = [comm.exchange(send=(state.contiguous(),), to=rank, tag="last state") for rank in others]
    for work in works:
        work.wait()
    return state


def _collect(comm: Comm, dstate: State, owner: int) -> State:
    """Return the sum of all ranks' gradients on rank `owner`, and zeros on the other ranks."""
    if comm.rank != owner:
        comm.exchange(send=(dstate.contiguous(),), to=owner, tag="last dstate").wait()
        return torch.zeros_like(dstate)
    parts = [dstate if rank == owner else torch.empty_like(dstate) for rank in range(comm.world_size)]
    works = [
        comm.exchange(receive=(part,), source=rank, tag="last dstate")
        for rank, part in enumerate(parts)
        if rank != owner
    ]
    for work in works:
        work.wait()
    return torch.stack(parts).sum(0)
