"""Passes states, by any scan, along a chain of elements: stretches of tokens that are on different ranks.

A stretch of tokens changes a state by an affine map, to transition · state + contribution. Two successive
stretches together are such a map too, so ranks can compose stretches before any state has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ringlab.comm.protocol import Comm, thread_safe
from ringlab.scan.graph import Hop, Plan
from ringlab.types import State

Transition: TypeAlias = Float[Tensor, "B H _ _"]
"""A factor (B, H, 1, 1), or a matrix (B, H, D, D)."""


class Passage(NamedTuple):
    """The change of a state by a stretch of tokens, to `transition` · state + `contribution`.

    transition: None if the state that leaves does not depend on the state that enters.

    >>> import torch
    >>> half, one = torch.full((1, 1, 1, 1), 0.5), torch.ones(1, 1, 2, 3)
    >>> after(Passage(half, one), Passage(half, one)).transition.item()
    0.25
    """

    transition: Transition | None
    contribution: State

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the message that carries this passage."""
        parts = (self.transition, self.contribution)
        return tuple(x.contiguous() for x in parts if x is not None)


@thread_safe
def after(later: Passage, earlier: Passage) -> Passage:
    """Return the passage through `earlier` and then through `later`."""
    if later.transition is None:
        return later
    contribution = _apply(later.transition, earlier.contribution) + later.contribution
    if earlier.transition is None:
        return Passage(None, contribution)
    return Passage(_apply(later.transition, earlier.transition), contribution)


def _apply(transition: Tensor, state: Tensor) -> Tensor:
    return transition * state if transition.shape[-1] == 1 else transition @ state


def pass_states(
    comm: Comm,
    plan: Plan,
    entering: dict[int, Passage],
    passage_of: Callable[[int], Passage],
    like: Passage,
    tag: str,
) -> dict[int, Passage]:
    """Return the passages that enter this rank's elements, by element.

    entering: the entering states that are known before any message, by element, as passages without a
    transition.
    passage_of: computes the passage of an element of this rank. It is called only for passages that other
    elements need.
    like: a passage with the shapes, dtype and device of all messages.
    """
    entering, mine = dict(entering), [_sources(hops, plan, comm.rank) for hops in plan.rounds]
    # Compute all passages before the first round, so that all ranks compute at the same time. Between the
    # hops of a relay, ranks then only multiply small matrices.
    own = {source: passage_of(source) for source in dict.fromkeys(chain.from_iterable(mine))}
    for number, hops in enumerate(plan.rounds):
        leaving = {}
        for source in mine[number]:
            known = entering.get(source)
            leaving[source] = own[source] if known is None else _after(comm, own[source], known)
        leaving |= _exchange(comm, plan, number, leaving, like, f"{tag} {number}")
        for hop in hops:
            if plan.owners[hop.target] == comm.rank:
                near, far = entering.get(hop.target), leaving[hop.source]
                entering[hop.target] = far if near is None else _after(comm, near, far)
    return entering


def _sources(hops: Sequence[Hop], plan: Plan, rank: int) -> list[int]:
    """Return the elements of this rank that send in a round, without repetition."""
    return list(dict.fromkeys(hop.source for hop in hops if plan.owners[hop.source] == rank))


def _after(comm: Comm, later: Passage, earlier: Passage) -> Passage:
    return comm.compute("compose passages", after, later, earlier)


def _exchange(
    comm: Comm, plan: Plan, number: int, leaving: dict[int, Passage], like: Passage, tag: str
) -> dict[int, Passage]:
    """Send this rank's passages of a round, and return the received ones by their source element."""
    pending = []
    for source, rank, whole in plan.messages(number):
        if plan.owners[source] == comm.rank:
            pending.append((source, comm.exchange(send=leaving[source].tensors, to=rank, tag=tag)))
        elif rank == comm.rank:
            message = like._replace(transition=None) if whole else like
            into = tuple(torch.empty_like(x) for x in message.tensors)
            owner = plan.owners[source]
            pending.append((source, comm.exchange(receive=into, source=owner, tag=tag)))
    arrived = {}
    for source, work in pending:
        if received := work.wait():
            transition = received[0] if len(received) == 2 else None
            arrived[source] = Passage(transition, received[-1])
    return arrived
