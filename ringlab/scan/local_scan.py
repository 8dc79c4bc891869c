"""One rank's part of linear attention: a stretch of adjacent tokens, chunk by chunk, forward and backward.

Four functions walk over the chunks of a stretch. The first two go forward and the others backward:

    passage      the passage of a state through the stretch   before the state that enters has arrived
    attend       the outputs, and the state that leaves       after the state that enters has arrived
    passage_back the backward passage of a state's gradient   before the leaving state's gradient has arrived
    gradients    gradients of tokens and the entering state   after that gradient has arrived

With the delta rule, the transition of a passage is a matrix. The recurrence treats the columns of a state
independently. To find the matrix, the walk therefore carries D more columns, which begin as the identity and
to which no values are written.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringlab.comm.protocol import thread_safe
from ringlab.scan.chunk import Chunk, TokenGradients, Tokens
from ringlab.scan.executor import Passage
from ringlab.types import State, Values


def _rows(tokens: Tokens, length: int) -> list[slice]:
    L = tokens.q.shape[2]
    return [slice(start, min(start + length, L)) for start in range(0, L, length)]


@thread_safe
def passage(tokens: Tokens, like: Passage, length: int) -> Passage:
    """Return the passage of a state through the tokens, in the shapes of `like`."""
    walk = _Walk(tokens, like)
    state = walk.state
    for rows in _rows(tokens, length):
        part = tokens.rows(rows).widened()
        chunk = Chunk.of(part._replace(v=walk.widen(part.v)))
        state = chunk.leave(state, chunk.write(state))
    return walk.end(state)


@thread_safe
def passage_back(tokens: Tokens, dout: Values, like: Passage, length: int, scale: float) -> Passage:
    """Return the passage of a state's gradient from the last token to the first, with `dout` added."""
    walk = _Walk(tokens, like)
    dstate = walk.state
    for rows in reversed(_rows(tokens, length)):
        chunk = Chunk.of(tokens.rows(rows).widened())
        part = walk.widen(dout[..., rows, :].to(dstate.dtype) * scale)
        dstate = chunk.enter_back(part, dstate, chunk.write_back(part, dstate))
    return walk.end(dstate)


class _Walk:
    """Makes the first state of a walk over chunks, and finds the `Passage` in the last state."""

    def __init__(self, tokens: Tokens, like: Passage) -> None:
        nothing = torch.zeros_like(like.contribution)
        self.columns, self.state, self.factor = 0, nothing, like.transition
        if like.transition is None:
            return
        if tokens.beta is not None:
            self.columns = D = nothing.shape[-2]
            identity = torch.eye(D, dtype=nothing.dtype, device=nothing.device).expand(
                *nothing.shape[:2], D, D
            )
            self.state = torch.cat([identity, nothing], dim=-1)
        elif tokens.decay is not None:
            self.factor = tokens.decay.to(nothing.dtype).sum(-1).exp()[..., None, None]
        else:
            self.factor = torch.ones_like(like.transition)

    def widen(self, values: Tensor) -> Tensor:
        """Return the values with zeros in front, for the additional columns that find the transition."""
        return pad(values, (self.columns, 0))

    def end(self, state: Tensor) -> Passage:
        """Return the passage, given the state at the end of the walk."""
        if self.columns == 0:
            return Passage(self.factor, state)
        return Passage(state[..., : self.columns], state[..., self.columns :])


@thread_safe
def attend(tokens: Tokens, state: State, length: int, scale: float) -> tuple[Values, State]:
    """Return the outputs of the tokens (in v's dtype) and the state that leaves, if `state` enters."""
    out = torch.empty_like(tokens.v)
    for rows in _rows(tokens, length):
        chunk = Chunk.of(tokens.rows(rows).widened())
        written = chunk.write(state)
        out[..., rows, :] = scale * chunk.read(state, written)
        state = chunk.leave(state, written)
    return out, state


@thread_safe
def gradients(
    tokens: Tokens, state: State, dout: Values, dleft: State, length: int, scale: float
) -> tuple[TokenGradients, State]:
    """Return the gradients of the tokens and of the entering `state`.

    dleft: the gradient of the state that leaves. The states between chunks are computed again and kept,
    which takes D · Dv numbers for each chunk.
    """
    entering, all_rows, parts = [state], _rows(tokens, length), []
    for rows in all_rows[:-1]:
        chunk = Chunk.of(tokens.rows(rows).widened())
        entering.append(chunk.leave(entering[-1], chunk.write(entering[-1])))
    for rows in reversed(all_rows):
        part = dout[..., rows, :].to(dleft.dtype) * scale
        found, dleft = Chunk.of(tokens.rows(rows).widened()).gradients(entering.pop(), part, dleft)
        parts.append(found)
    return _joined(parts[::-1]), dleft


def _joined(parts: list[TokenGradients]) -> TokenGradients:
    """Return the gradients of all chunks, concatenated along the tokens."""
    dq, dk, dv = (torch.cat(each, dim=2) for each in zip(*(part[:3] for part in parts), strict=True))
    dbeta = [part.dbeta for part in parts if part.dbeta is not None]
    ddecay = torch.cat([part.ddecay for part in parts], dim=2)
    return TokenGradients(dq, dk, dv, ddecay, torch.cat(dbeta, dim=2) if dbeta else None)
