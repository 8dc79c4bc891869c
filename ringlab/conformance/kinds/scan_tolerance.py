"""The largest allowed error of linear attention, derived from the plainest implementation and never guessed.

The rule is that of `ringlab.conformance.tolerance`. On the same input, an error against the float64 oracle
may be at most the sum of three terms. The first is twice the error of the plainest implementation. The second
is one unit of last place of the result's dtype at the result's scale, because the result has to be stored.
The third is the change of the truth if every input is rounded again in the state's dtype. A sum whose terms
cancel, such as a decay's gradient, may change by much more than its own unit of last place. In float64 the
third term counts twice, because the oracle rounds as much.

The plainest implementations are those of `ringlab.scan.plain` on one rank: the recurrence token by token, and
all tokens of a document at once, or in 2, 3 and 4 chunks. They compute in the state's dtype, with gradients
by autograd, and round every result once to the dtype of its input. So for bfloat16 inputs too, the bound
leaves no room for a state or a message in bfloat16. The largest error of all these implementations counts,
over a few orders of summing the channels of the keys, so that it does not depend on luck.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from ringlab.conformance.tolerance import FACTOR, ORDERS, relative_error
from ringlab.merge import state_dtype
from ringlab.scan import oracle
from ringlab.scan.plain import by_chunks, recurrence
from ringlab.types import Gate, Keys, State, Values

NAMES = ("out", "state", "dq", "dk", "dv", "ddecay", "dbeta", "dinitial")


class Results(NamedTuple):
    """All results of linear attention, forward and backward; None for results that do not exist.

    They are torch tensors, or float64 arrays for the truth.
    """

    out: Any
    state: Any
    dq: Any
    dk: Any
    dv: Any
    ddecay: Any
    dbeta: Any
    dinitial: Any


@dataclass(frozen=True)
class Inputs:
    """The inputs of linear attention for the whole sequence, and the gradients of its results.

    decay, beta and initial may be None.
    """

    q: Keys
    k: Keys
    v: Values
    decay: Gate | None
    beta: Gate | None
    initial: State | None
    dout: Values
    dstate: State
    documents: tuple[int, ...] = ()

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that have gradients, in the order of `Results`."""
        return self.q, self.k, self.v, self.decay, self.beta, self.initial

    @property
    def scale(self) -> float:
        """Return the scale, D^−½."""
        return float(self.q.shape[-1] ** -0.5)


def truth(inputs: Inputs) -> Results:
    """Return the oracle's results in float64; the inputs must already be rounded to their dtypes."""
    options: dict[str, Any] = {
        "decay": inputs.decay,
        "beta": inputs.beta,
        "documents": inputs.documents,
        "initial_state": inputs.initial,
    }
    q, k, v = inputs.q, inputs.k, inputs.v
    found = oracle.gradients(q, k, v, inputs.dout, dstate=inputs.dstate, **options)
    given = (None if leaf is None else x for leaf, x in zip(inputs.leaves, found, strict=True))
    return Results(*oracle.linear_attention(q, k, v, **options), *given)


def plainest(inputs: Inputs, order: Int64[Tensor, " D"], chunks: int = 0) -> Results:
    """Return the results of the recurrence, or of `chunks` chunks of each document if that is above 0.

    They are computed in the state dtype, and each is rounded once. order: the order of the channels of the
    keys.
    """
    dtype = state_dtype(inputs.q.dtype)
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs.leaves]
    with torch.enable_grad():
        out, state = _walk(inputs, leaves, order, chunks)
    given = [x for x in leaves if x is not None]
    cotangents = inputs.dout.to(dtype), inputs.dstate[:, :, order].to(dtype)
    found = iter(torch.autograd.grad((out, state), given, cotangents, materialize_grads=True))
    gradients = (
        None if x is None else next(found).to(leaf.dtype)  # type: ignore[union-attr]
        for x, leaf in zip(leaves, inputs.leaves, strict=True)
    )
    return Results(out.detach().to(inputs.v.dtype), state.detach()[:, :, torch.argsort(order)], *gradients)


def _walk(inputs: Inputs, leaves: list[Any], order: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last state, computed document by document."""
    q, k, v, decay, beta, state = leaves
    shared = v.shape[1] // q.shape[1]
    q, k = (x[..., order].repeat_interleave(shared, dim=1) for x in (q, k))
    decay = torch.zeros_like(v[..., 0]) if decay is None else decay
    state = v.new_zeros(*v.shape[:2], len(order), v.shape[-1]) if state is None else state[:, :, order]
    outs, bounds = [], [0, *np.cumsum(inputs.documents or (v.shape[2],)).tolist()]
    for start, stop in pairwise(bounds):
        part = tuple(None if x is None else x[:, :, start:stop] for x in (q, k, v, decay, beta))
        walk: Any = partial(by_chunks, length=max(1, -(-(stop - start) // chunks))) if chunks else recurrence
        out, left = walk(*part, state, inputs.scale)
        outs.append(out)
        state = left if stop == v.shape[2] else torch.zeros_like(state)
    return torch.cat(outs, dim=2), state


def errors(results: Results, true: Results) -> dict[str, float]:
    """Return the `relative_error` of each result that exists."""
    return {
        name: relative_error(getattr(results, name), getattr(true, name))
        for name in NAMES
        if getattr(true, name) is not None
    }


def bounds(inputs: Inputs, true: Results) -> dict[str, float]:
    """Return the largest allowed error of each result; `true` is the value of `truth`."""
    generator, D = torch.Generator().manual_seed(0), inputs.q.shape[-1]
    plain = dict.fromkeys(errors(true, true), 0.0)
    for turn in range(ORDERS):
        order = torch.randperm(D, generator=generator) if turn else torch.arange(D)
        for chunks in (0, turn + 1):
            found = errors(plainest(inputs, order, chunks), true)
            plain = {name: max(plain[name], found[name]) for name in plain}
    moved = _errors_of_rounded_inputs(inputs, true)
    return {name: FACTOR * plain[name] + moved[name] + _stored(inputs, true, name) for name in plain}


def _errors_of_rounded_inputs(inputs: Inputs, true: Results) -> dict[str, float]:
    """Return the largest change of each result over a few draws of rounding errors in every input.

    Each input moves by at most one unit of last place.
    """
    generator = torch.Generator().manual_seed(0)
    unit, largest = torch.finfo(state_dtype(inputs.q.dtype)).eps, dict.fromkeys(errors(true, true), 0.0)

    def rounded(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        moves = 2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1
        return x.double() * (1 + unit * moves)

    for _ in range(ORDERS):
        near = Inputs(*(rounded(getattr(inputs, field.name)) for field in fields(inputs)))
        found = errors(truth(near), true)
        largest = {name: max(largest[name], found[name]) for name in largest}
    times = 2 if inputs.q.dtype == torch.float64 else 1
    return {name: times * error for name, error in largest.items()}


def _stored(inputs: Inputs, true: Results, name: str) -> float:
    """Return a unit of last place, relative to the largest entry; 0 if the whole truth is zero."""
    if not np.any(getattr(true, name)):
        return 0.0
    leaf = dict(zip(NAMES[2:], inputs.leaves, strict=True)).get(name)
    dtype = (
        {"out": inputs.v.dtype, "state": state_dtype(inputs.v.dtype)}[name] if leaf is None else leaf.dtype
    )
    return float(torch.finfo(dtype).eps)
