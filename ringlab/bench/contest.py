"""Compares ring attentions that run in turn on the ranks of one group, and checks the results of every call.

An entrant is a target of the conformance suite, run under the first of its layouts. Its results at a sample
of tokens are compared with float64, as in `ringlab.bench.reference`: first the results of an untimed call,
then the results of every timed call, after its clock has stopped. Each call gets different inputs, so results
cached from another call are wrong. An entrant that is wrong once is still timed, and reported as wrong.

A draw is a set of inputs whose true results are known. Each call gets the inputs of a draw after a random turn, by
which heads change places and numbers change signs. In each head and column, q and k change sign together, and v
and the gradient of out change sign together. In addition, all of a head's v can change sign. Scores and their
softmax stay the same, while out, dq, dk and dv change signs and places. The true results of the call therefore follow
from those of the draw. A turn rounds nothing, so errors keep their size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ringlab.bench.device import Ranks
from ringlab.bench.interleaved import Times, Turn, interleaved, speed_ratio
from ringlab.bench.problem import Inputs
from ringlab.bench.reference import Reference, errors
from ringlab.comm.ring import Ring
from ringlab.conformance.target.calling import as_axes, call, tensors_of
from ringlab.conformance.target.claims import Target
from ringlab.errors import LabError


@dataclass(frozen=True)
class Turned:
    """A turn: a permutation of heads and changes of sign that are applied to the inputs of a call.

    heads (H,): the old head at each new place. The other tensors are signs, +1 or −1. qk (H, 1, D): the signs of
    q and k. v (H, 1, D): the signs of v and of the gradient of out. values (H, 1, 1): a common sign of a head's v.
    """

    heads: Tensor
    qk: Tensor
    v: Tensor
    values: Tensor

    @classmethod
    def drawn(cls, H: int, D: int, generator: torch.Generator) -> Turned:
        """Return a random turn. The generator must be one for the CPU."""

        def signs(*shape: int) -> Tensor:
            return torch.randint(2, shape, generator=generator, dtype=torch.int8) * 2 - 1

        return cls(torch.randperm(H, generator=generator), signs(H, 1, D), signs(H, 1, D), signs(H, 1, 1))

    def inputs(
        self,
        q: Float[Tensor, "B H L D"],
        k: Float[Tensor, "B H L D"],
        v: Float[Tensor, "B H L D"],
        dout: Float[Tensor, "B H L D"],
    ) -> tuple[Float[Tensor, "B H L D"], ...]:
        """Return the turned q, k, v and gradient of out, in the same dtype."""
        by = (self.qk, self.qk, self.v * self.values, self.v)
        return tuple(
            x.index_select(1, self.heads.to(x.device)) * signs.to(x)
            for x, signs in zip((q, k, v, dout), by, strict=True)
        )

    def back(self, name: str, rows: Float[Tensor, "H n D"]) -> Float[Tensor, "H n D"]:
        """Return rows of the result `name` ("out", "dq", "dk" or "dv") with the turn undone."""
        signs = {
            "out": self.v * self.values,
            "dq": self.qk * self.values,
            "dk": self.qk * self.values,
            "dv": self.v,
        }[name]
        return (rows * signs.to(rows))[self.heads.argsort()]


PASSES = {"forward": ("out",), "forward_backward": ("out", "dq", "dk", "dv")}
WARM_UP = 2


@dataclass(frozen=True)
class Sampled:
    """One rank's rows at its sampled tokens.

    numbers: the indices of these tokens in the sample of all ranks. rows: the rows (H, n, D) of each result, by
    name. finite: whether the results of all the rank's tokens are finite.
    """

    numbers: list[int]
    rows: dict[str, Tensor]
    finite: bool


@dataclass(frozen=True)
class Look:
    """The results of one call with the turn undone. draw: the number of the draw that gave its inputs."""

    draw: int
    timed: bool
    sampled: Sampled


@dataclass(frozen=True)
class Passed:
    """A pass on this rank: the results of each call, and the seconds of each timed call, both by entrant."""

    of: str
    looks: dict[str, list[Look]]
    times: Times


def compete(
    ring: Ring,
    draws: Sequence[Inputs],
    entrants: Mapping[str, Target],
    tokens: Int[Tensor, " tokens"],
    rounds: int,
    beside: Mapping[str, Callable[[str], Any]] | None = None,
    seed: int = 0,
    called: Callable[[], None] = lambda: None,
) -> Iterator[Passed]:
    """Yield each causal pass twice: after one untimed call of every entrant, and after all timed calls.

    draws: whole sequences, the same on all ranks. Each call gets one of them, turned as described above.
    beside: further functions that are timed in turn, by name. Every rank calls them with the name of the pass.
    called: a function that is called on every rank after each timed call, when its clock has stopped.
    Without rounds nothing is timed.
    Raises: LabError for results that are not plain tensors of the shard's shape.
    """
    generator = torch.Generator().manual_seed(seed)
    made = {name: _Entrant(name, target, ring, draws, tokens) for name, target in entrants.items()}
    device = draws[0].q.device
    for of in PASSES:
        looks: dict[str, list[Look]] = {name: [one.look(of, generator)] for name, one in made.items()}
        yield Passed(of, looks, {})
        if not rounds:
            continue
        turns = {
            name: Turn(partial(one.run, of), partial(one.prepared, of, generator))
            for name, one in made.items()
        }
        turns |= {name: Turn(partial(_other, run, of)) for name, run in (beside or {}).items()}

        def seen(kept: Any, looks: dict[str, list[Look]] = looks) -> None:
            called()
            if isinstance(kept, _Returned):
                looks[kept.by.name].append(kept.by.looked(kept, timed=True))

        times = interleaved(turns, Ranks(ring, device, seen), rounds, WARM_UP)
        yield Passed(of, looks, times)


def errors_of(parts: list[Sampled], expected: Reference) -> dict[str, Tensor]:
    """Return the errors of one call of one entrant in each sampled row, (H, tokens), by result.

    parts: the rows of all ranks. An error is NaN if a rank's result is not finite, or if no rank has the row.
    """
    found = {}
    for name in parts[0].rows:
        whole = torch.full_like(expected.true[name], torch.nan)
        for part in parts:
            whole[:, part.numbers] = part.rows[name].to(whole.dtype)
        error = errors(name, whole, expected.true[name])
        found[name] = error if all(part.finite for part in parts) else torch.full_like(error, torch.nan)
    return found


def worst_of(calls: Sequence[tuple[int, list[Sampled]]], expected: Sequence[Reference]) -> dict[str, Tensor]:
    """Return each row's largest error over an entrant's calls, (H, tokens of all draws), by result.

    calls: for each call the number of its draw, and the rows of all ranks. A row is NaN if one of its errors
    is NaN. Rows of a draw that no call used are 0.
    """
    found: dict[str, list[Tensor]] = {
        name: [torch.zeros_like(of.bounds[name]) for of in expected] for name in calls[0][1][0].rows
    }
    for draw, parts in calls:
        for name, error in errors_of(parts, expected[draw]).items():
            found[name][draw] = torch.maximum(found[name][draw], error.to(found[name][draw]))
    return {name: torch.cat(by_draw, dim=1) for name, by_draw in found.items()}


def joined(expected: Sequence[Reference]) -> Reference:
    """Return the references of several draws as one, with their rows concatenated."""
    true, bounds = (
        {name: torch.cat([of[name] for of in parts], dim=1) for name in parts[0]}
        for parts in ([each.true for each in expected], [each.bounds for each in expected])
    )
    return Reference(torch.cat([each.tokens for each in expected]), true, bounds)


def case(
    P: int,
    of: str,
    found: dict[str, dict[str, Float[Tensor, "H tokens"]]],
    expected: Reference,
    times: Times,
    ours: str,
) -> dict[str, Any]:
    """Return one pass on P ranks, for JSON: each entrant's correctness and times, and the fastest correct one.

    `ratio` is the median over rounds of an entrant's time divided by the time of the entrant `ours`.
    """
    contenders = judged(of, found, expected)
    for name, each in contenders.items():
        each["median_s"] = statistics.median(times[name])
        each["ratio"] = round(speed_ratio(times, ours, name), 4)
        each["times_s"] = list(times[name])
    right = [name for name, each in contenders.items() if each["correct"]]
    fastest = min(right, key=lambda name: float(contenders[name]["median_s"]), default=None)
    return {"P": P, "pass": of, "fastest_correct": fastest, "contenders": contenders}


def judged(
    of: str, found: dict[str, dict[str, Float[Tensor, "H tokens"]]], expected: Reference
) -> dict[str, dict[str, Any]]:
    """Return for each entrant of a pass whether it is correct, its largest errors, and the errors allowed."""
    contenders: dict[str, dict[str, Any]] = {}
    for name in found:
        of_result = {result: _of_largest(found[name][result], expected, result) for result in PASSES[of]}
        contenders[name] = {
            "correct": all(error <= allowed for error, allowed in of_result.values()),
            "errors": {result: error for result, (error, _) in of_result.items()},
            "bounds": {result: allowed for result, (_, allowed) in of_result.items()},
            "row_errors": {result: float(found[name][result].max()) for result in PASSES[of]},
        }
    return contenders


def _of_largest(rows: Tensor, expected: Reference, result: str) -> tuple[float, float]:
    """Return the largest error of a row and the largest allowed error, both relative to the largest row."""
    lengths = expected.true[result].double().norm(dim=-1)
    lengths = lengths.clamp(min=float(lengths.median()))
    largest = float(lengths.max())
    return float((rows * lengths).max()) / largest, float((expected.bounds[result] * lengths).max()) / largest


@dataclass(frozen=True)
class _Returned:
    """The value of a call: out, or out, dq, dk and dv, with the order of axes that the entrant uses."""

    by: _Entrant
    draw: int
    turned: Turned
    results: tuple[Tensor, ...]


Prepared = tuple[int, Turned, tuple[Tensor, ...]]


class _Entrant:
    """A target on this rank.

    It turns its share of a draw for each call, and undoes the turn in the sampled rows.
    """

    def __init__(
        self, name: str, target: Target, ring: Ring, draws: Sequence[Inputs], tokens: Tensor
    ) -> None:
        layout, P, S = next(iter(target.layouts)), ring.world_size, draws[0].q.shape[-2]
        device = draws[0].q.device
        owned = target.positions(layout, S, P)
        positions = tensors_of(owned, device)
        self.target, self.name = target, name
        self.shares = [[x.index_select(-2, positions[ring.rank]) for x in inputs] for inputs in draws]
        self.known = {
            "ring": ring, "comm": ring.comm, "group": _group(), "rank": ring.rank, "world_size": P, "causal": True,
            "is_causal": True, "layout": target.known_layout(layout, S, P) or layout, "positions": positions,
            "scale": None, "return_lse": False, **target.options,
        }  # fmt: skip
        place = {position: index for index, position in enumerate(owned[ring.rank].tolist())}
        self.numbers = [number for number, token in enumerate(tokens.tolist()) if token in place]
        self.rows = torch.tensor([place[int(tokens[number])] for number in self.numbers], dtype=torch.int64)

    def prepared(self, of: str, generator: torch.Generator) -> Prepared:
        """Return the inputs of a call: a random draw with a random turn."""
        draw = int(torch.randint(len(self.shares), (1,), generator=generator))
        _, H, _, D = self.shares[draw][0].shape
        turned = Turned.drawn(H, D, generator)
        axes, wanted = self.target.axes, 3 if of == "forward" else 4
        return draw, turned, tuple(as_axes(x, axes) for x in turned.inputs(*self.shares[draw])[:wanted])

    def run(self, of: str, given: Prepared) -> _Returned:
        """Return the value of a call. Only this function is timed."""
        draw, turned, (q, k, v, *dout) = given
        gradients = of != "forward"
        leaves = tuple(x.detach().requires_grad_(gradients) for x in (q, k, v))
        with torch.set_grad_enabled(gradients):
            result = call(self.target.function, (leaves[0], leaves[1], leaves[2]), self.known)
        out: Tensor = result[0] if isinstance(result, (tuple, list)) else result
        grads = torch.autograd.grad(out, leaves, dout[0]) if gradients else ()
        return _Returned(self, draw, turned, (out, *grads))

    def look(self, of: str, generator: torch.Generator) -> Look:
        """Return the results of an untimed call with random inputs."""
        return self.looked(self.run(of, self.prepared(of, generator)), timed=False)

    def looked(self, returned: _Returned, *, timed: bool) -> Look:
        """Return a copy of the sampled rows of a call's value.

        Raises: LabError for results that are not plain tensors of the shard's shape.
        """
        rows, finite = {}, True
        share = self.shares[returned.draw][0]
        for name, x in zip(PASSES["forward_backward"], returned.results, strict=False):
            if type(x) is not Tensor:  # a lazy tensor would be computed after the clock has stopped
                raise LabError(f"{name} of {self.name} as a torch.Tensor that is computed", type(x).__name__)
            whole = as_axes(x.detach(), self.target.axes)
            if whole.shape != share.shape:
                got = f"{list(x.shape)} of axes {self.target.axes}"
                raise LabError(f"{name} of {self.name} of the shape of its q, {list(share.shape)}", got)
            finite &= bool(whole.isfinite().all())
            rows[name] = returned.turned.back(name, whole[0].cpu().index_select(1, self.rows))
        return Look(returned.draw, timed, Sampled(self.numbers, rows, finite))


def _group() -> Any:
    """Return the default group, which functions over torch.distributed need, or None on virtual ranks."""
    return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None


def _other(run: Callable[[str], Any], of: str, _: Any) -> Any:
    return run(of)
