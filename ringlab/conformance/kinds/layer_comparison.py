"""Compares the values that the modules of a model returned on P ranks with those on one process.

The bound. On the same inputs, in the same dtype, the error against the truth may be FACTOR · CHANCE times
that of the plain run. All bounds in ringlab have FACTOR (`ringlab.conformance.tolerance`). CHANCE widens
bounds where hundreds of results are compared (`ringlab.conformance.checks.measuring`). The plain run's error
is its largest over all tokens and features of the same tensor, and the larger one of two orders in which the terms
of products are added up. One unit of last place of the tensor's
largest entry, ε max |truth|, is added, because a plain run may be exact by luck. A scalar, such as a loss,
is a sum over n = B S tokens. Rounding moves each partial sum by at most ε/2 of itself, and so the whole sum
by a standard deviation below ε √n |truth| / (2√3). For a scalar, ε √n |truth| is added, more than three of
these deviations.
For a model in float64, no truth is more exact than the model itself. So its plain run is in float32, and the
bound that follows is multiplied by 2⁻²⁹, because to first order an error is proportional to ε.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ringlab.conformance.checks.measuring import CHANCE
from ringlab.conformance.kinds.layer_runs import SILENT
from ringlab.conformance.kinds.recording import STEP, Key, Plan, Recording, index_of, place_of, same
from ringlab.conformance.tolerance import FACTOR
from ringlab.errors import BackendError, apart

FOLLOWS = "It may follow from the difference above."
_SHOWN = 3  # the names that a sentence lists before it counts the others


@dataclass(frozen=True)
class Difference:
    """A tensor whose error exceeds its bound.

    stage: weights, tokens, forward, backward, or weight gradients. token: the first token of the whole
    sequence with such an error, or None for a tensor without tokens. rank: the rank of this token, or None
    for a sum over ranks. ranks: all ranks on which the error exceeds the bound. error, allowed: the error
    and its bound on `rank`. text: two sentences, on the difference and on the places to look at.
    """

    stage: str
    module: str
    what: str
    rank: int | None
    ranks: tuple[int, ...]
    token: int | None
    error: float
    allowed: float
    text: str

    @property
    def ratio(self) -> float:
        """Return the error as a multiple of its bound."""
        return self.error / self.allowed if self.allowed else math.inf


@dataclass(frozen=True)
class LayerReport:
    """The first difference of each stage between P ranks and one process; none if the two agree.

    compared: the number of tensors that were compared. notes: sentences on what was left out, and why.
    """

    target: str
    over: str
    transport: str
    dtype: str
    plan: Plan
    compared: int
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Return whether nothing differs."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """Return the report as data for JSON."""
        found = [{**asdict(each), "ratio": each.ratio} for each in self.differences]
        return {"ok": self.ok, **asdict(self), "differences": found}

    def __str__(self) -> str:
        documents = (
            f" in documents of {', '.join(map(str, self.plan.documents))}" if self.plan.documents else ""
        )
        how = f"{self.target} over {self.over}, {self.transport}: {self.plan.P} ranks beside one process, in {self.dtype}, {self.plan.S} tokens{documents}"
        said = [each.text for each in self.differences] or ["no difference"]
        return "\n\n".join([*said, f"{how}; {self.compared} tensors compared", *self.notes])


@dataclass(frozen=True)
class _Leaves:
    """A tensor whose error exceeds its bound, for `count` of the `length` tokens on `rank`."""

    rank: int | None
    ranks: tuple[int, ...]
    token: int | None
    count: int
    length: int
    error: float
    allowed: float


class Comparison:
    """The recordings of all runs, and what differs between them."""

    def __init__(self, plan: Plan, truth: Recording, plain: Recording, parts: list[Recording]) -> None:
        self.plan, self.truth, self.plain, self.parts = plan, truth, plain, parts
        self.indices = [index_of(truth, part) for part in parts]
        in_float64 = truth.dtype == torch.float64 and plain.values
        self.share = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if in_float64 else 1.0
        self.compared = 0
        self.notes: list[str] = []
        self.factor = 1

    def report(self, target: str, over: str, transport: str) -> LayerReport:
        """Return the first difference of each stage. Raises: BackendError if a rank's tokens are unknown."""
        found = [*self._weights(), *self._tokens(), *self._forward()]
        found += self._backward(
            follows=any(each.stage == "forward" and each.token is not None for each in found)
        )
        if all(each.stage in ("weights", "tokens") for each in found):
            found += self._weight_gradients()
        found += self._errors()
        dtype = str(self.truth.dtype).removeprefix("torch.")
        return LayerReport(
            target, over, transport, dtype, self.plan, self.compared, tuple(found), tuple(self.notes)
        )

    # Stages: each yields at most one difference.

    def _weights(self) -> Iterator[Difference]:
        found: list[tuple[str, int, float, str]] = []
        for name, x in self.plain.weights.items():
            for rank, part in enumerate(self.parts):
                y = part.weights.get(name)
                if y is None or y.shape != x.shape:
                    continue  # the weight is sharded, or the rank failed before it had the weight
                self.compared += 1
                if y.dtype != x.dtype:
                    found.append(
                        (name, rank, math.inf, f"{_word(y.dtype)} there, and {_word(x.dtype)} on one process")
                    )
                elif not same(x, y):
                    away = (x.double() - y.double()).abs().nan_to_num(nan=math.inf)
                    at = np.unravel_index(int(away.argmax()), away.shape)
                    mine, theirs = apart(float(y[at]), float(x[at]))
                    place = f" at [{', '.join(map(str, at))}]" if at else ""
                    found.append(
                        (name, rank, float(away.max()), f"{mine}{place} there, and {theirs} on one process")
                    )
        if not found:
            return
        name, rank, error, how = found[0]
        ranks = tuple(sorted({each[1] for each in found if each[0] == name}))
        others = self._more([each[0] for each in found if each[0] != name])
        text = (
            f"The weight {name} differs before the first call on {_ranks(ranks)}: it is {how}{others}. "
            f"Look at how {_ranks(ranks)} {'get' if len(ranks) > 1 else 'gets'} weights: a seed, a checkpoint, a broadcast, a step of the optimizer."
        )
        yield Difference("weights", name.rpartition(".")[0], name, rank, ranks, None, error, 0.0, text)

    def _tokens(self) -> Iterator[Difference]:
        owned = {
            token: rank
            for rank, part in reversed([*enumerate(self.parts)])
            if part.positions is not None
            for token in part.positions.tolist()
        }
        hidden = tuple(r for r, part in enumerate(self.parts) if part.positions is None and not part.error)
        if hidden:
            raise BackendError(
                f"the batch's token ids, in all {self.plan.rows} rows, in the input of a module on every rank",
                f"none on {_ranks(hidden)}",
                "give the name of the step's layout: --layout; ranks with only some rows are not compared",
            )
        if self._uncut():
            self.notes.append(
                "each rank has all tokens: the model is called before the sequence is cut, or it is not cut"
            )
        missing = [token for token in self.truth.tokens if token not in owned]
        if not missing or any(part.positions is None for part in self.parts):
            return
        token = missing[0]
        near = owned.get(token - 1, owned.get(token + 1))
        module = self.parts[near or 0].found_in or STEP
        beside = f"; rank {near} has the token beside it" if near is not None else ""
        more = f", nor are {len(missing) - 1} others" if len(missing) > 1 else ""
        text = (
            f"{self.plan.place(token).capitalize()} is on no rank in the input of {module}{more}{beside}. "
            "Look at how the sequence is cut, and whether a length that the ranks do not divide loses its end."
        )
        yield Difference(
            "tokens", module, "tokens", near, () if near is None else (near,), token, math.inf, 0.0, text
        )

    def _uncut(self) -> bool:
        return all(sorted(part.tokens) == sorted(self.truth.tokens) for part in self.parts)

    def _forward(self) -> Iterator[Difference]:
        leaves: dict[Key, _Leaves] = {}
        skipped: list[str] = []
        calls = [part.calls for part in self.parts]
        for key, whole in self.truth.values.items():
            if not whole.is_floating_point() or key not in self.plain.values:
                continue
            xs = [part.values.get(key) for part in self.parts]
            other = next(
                (
                    r
                    for r, part in enumerate(self.parts)
                    if not part.error
                    and key.module != STEP
                    and calls[r][key.module] != self.truth.calls[key.module]
                ),
                None,
            )
            if other is not None:
                skipped.append(
                    f"{key.module} ({self.truth.calls[key.module]} calls on one process, {calls[other][key.module]} on rank {other})"
                )
                continue
            without = tuple(r for r, part in enumerate(self.parts) if xs[r] is None and not part.error)
            if without:
                skipped.append(f"{key} (none on {_ranks(without)})")
                continue
            found = self._leaves(whole, self.plain.values[key], xs)
            if isinstance(found, str):
                skipped.append(f"{key} ({found})")
            elif found is not None:
                leaves[key] = found
        if skipped:
            once = [*dict.fromkeys(skipped)]
            more = f", and {len(once) - _SHOWN} more" if len(once) > _SHOWN else ""
            self.notes.append(f"not compared: {', '.join(once[:_SHOWN])}{more}")
        if leaves:
            key, found = next(iter(leaves.items()))
            more = self._more([str(each) for each in leaves if each.module != key.module])
            text = f"{_capital(str(key))} is the first that differs: {self._said(found)}{more}. {self._look(key, found)}"
            yield self._difference("forward", key, found, text)

    def _backward(self, follows: bool) -> Iterator[Difference]:
        keys = [key for key in reversed(self.truth.gradients) if key in self.plain.gradients]
        self._find_factor(keys)
        before: Key | None = None
        for key in keys:
            whole = self.truth.gradients[key]
            xs = [self._gradient(part, key) for part in self.parts]
            found = (
                None
                if all(x is None for x in xs)
                else self._leaves(whole, self.plain.gradients[key], xs, self.factor)
            )
            if isinstance(found, _Leaves) and not self._is_summed(key, xs):
                look = FOLLOWS if follows else self._look_back(key, before, found)
                text = f"The gradient of {key} is the first in backward order that differs: {self._said(found)}. {look}"
                yield self._difference("backward", key, found, text)
                return
            if found is None and whole.ndim and whole.any():
                before = key

    def _is_summed(self, key: Key, xs: list[Tensor | None]) -> bool:
        """Return whether the ranks' gradients of a tensor that all of them hold add up to the true one."""
        whole, known = self.truth.gradients[key], [x for x in xs if x is not None]
        if len(known) < len(xs) or any(x.shape != whole.shape for x in known):
            return False
        total = torch.stack([x.double() for x in known]).sum(0)
        allowed = self.factor * self._allowed(whole, self.plain.gradients[key])
        return _largest(_away(total, self.factor * whole)) <= len(xs) * allowed

    def _weight_gradients(self) -> Iterator[Difference]:
        shares: list[Difference] = []
        wholes: list[str] = []
        for name, whole in self.truth.weight_gradients.items():
            plain = self.plain.weight_gradients.get(name)
            xs = [part.weight_gradients.get(name) for part in self.parts]
            if plain is None or all(x is None for x in xs) or any(part.error for part in self.parts):
                continue
            known = [torch.zeros_like(plain) if x is None else x for x in xs]
            if any(x.shape != whole.shape for x in known):
                continue  # sharded
            self.compared += 1
            scale = max(_scale(x) for x in (whole, *known))
            allowed = self._allowed(whole, plain, 0.0) + torch.finfo(
                plain.dtype
            ).eps * self.share * scale * len(known)
            errors = [_largest(_away(x, whole)) for x in known]
            total = torch.stack([x.double() for x in known]).sum(0)
            if max(errors) <= allowed:
                wholes += [name] if _largest(whole) > allowed else []
                continue
            rank = int(np.argmax(errors))
            ranks = tuple(r for r, error in enumerate(errors) if error > allowed)
            module = name.rpartition(".")[0]
            found = Difference("weight gradients", module, name, rank, ranks, None, errors[rank], allowed, "")
            is_share = _largest(_away(total, whole * self.factor)) <= allowed * self.factor
            alike = all(same(known[0], x) for x in known[1:]) and not self._uncut()
            if is_share and not alike:
                shares.append(found)
                continue
            sums = (
                f"it is the same on all ranks, the true one divided by {len(known)}"
                if is_share
                else "the sum over ranks differs too"
            )
            yield self._of_sums(found, f" by {errors[rank]:.2g}, and {allowed:.2g} is allowed; {sums}")
            return
        if shares and wholes:
            others = self._more([each.what for each in shares[1:]])
            yield self._of_sums(
                shares[0], f": it is each rank's share, and that of {wholes[0]} is whole{others}"
            )
        elif shares:
            some = ", ".join(each.what for each in shares[:_SHOWN]) + (", …" if len(shares) > _SHOWN else "")
            self.notes.append(
                f"gradients of weights are each rank's share, still to be summed over ranks: {some}"
            )

    def _of_sums(self, found: Difference, how: str) -> Difference:
        text = (
            f"The gradient of the weight {found.what} differs on {_ranks(found.ranks)}{how}. All gradients of outputs agree, "
            "so look at how gradients are summed over ranks: the group, the factor, and the weights that are left out."
        )
        return replace(found, text=text)

    def _errors(self) -> Iterator[Difference]:
        told = [(rank, part) for rank, part in enumerate(self.parts) if part.error]
        told.sort(
            key=lambda each: any(word in each[1].error for word in ("PeerDied", "AgreementError", SILENT))
        )
        if told:
            rank, part = told[0]
            where = f" while {part.at} was running" if part.at else ""
            text = f"Rank {rank} ended{where}: {part.error}."
            yield Difference(
                "error", part.at or STEP, "error", rank, tuple(r for r, _ in told), None, math.inf, 0.0, text
            )

    # Comparing one tensor.

    def _allowed(self, whole: Tensor, plain: Tensor, terms: float = 1.0) -> float:
        """Return the bound of the module's docstring. terms: √n for a sum of n terms."""
        error = _largest(_away(plain, whole)) if plain.shape == whole.shape else 0.0
        return self.share * (FACTOR * CHANCE * error + terms * torch.finfo(plain.dtype).eps * _scale(whole))

    def _leaves(
        self, whole: Tensor, plain: Tensor, xs: list[Tensor | None], factor: int = 1
    ) -> _Leaves | str | None:
        """Return the first error beyond its bound in the ranks' tensors, or None if there is none.

        Return a reason in words if the tensors cannot be compared.
        """
        if whole.ndim == 0:
            return self._scalar(whole, plain, xs, factor)
        allowed = factor * self._allowed(whole, plain)
        found: list[_Leaves] = []
        for rank, (x, index) in enumerate(zip(xs, self.indices, strict=True)):
            if x is None:
                continue
            place = (
                None
                if index is None
                else place_of(whole, x, (len(self.truth.tokens), len(index)), self.plan.rows)
            )
            if place is None and x.shape != whole.shape:
                return f"{tuple(x.shape)} on rank {rank}, {tuple(whole.shape)} on one process"
            self.compared += 1
            if place is None or index is None:
                error = _largest(_away(x, factor * whole))
                if error > allowed:
                    found.append(_Leaves(rank, (rank,), None, 0, 0, error, allowed))
                continue
            real = index >= 0
            away = _away(place.tokens(x)[real], factor * place.tokens(whole, index[real])).flatten(1)
            away = away.amax(1) if away.shape[1] else away.sum(1)
            positions = np.asarray(self.parts[rank].positions)[real.numpy()]
            beyond = positions[(away > allowed).numpy()]
            if len(beyond):
                found.append(
                    _Leaves(
                        rank,
                        (rank,),
                        int(beyond.min()),
                        len(beyond),
                        len(positions),
                        float(away.max()),
                        allowed,
                    )
                )
        if not found:
            return None
        first = min(found, key=lambda each: (each.token is not None, each.token or 0))
        return replace(first, ranks=tuple(each.rank for each in found if each.rank is not None))

    def _scalar(self, whole: Tensor, plain: Tensor, xs: list[Tensor | None], factor: int) -> _Leaves | None:
        """Return the scalars' error beyond its bound; None if each, their sum or their mean is right."""
        known = [float(x) for x in xs if x is not None]
        if len(known) < len(xs):
            return None
        self.compared += 1
        allowed = factor * self._allowed(whole, plain, math.sqrt(self.plan.S * self.plan.rows))
        true, total = factor * float(whole), sum(known)
        alike, summed = max(abs(x - true) for x in known), abs(total - true)
        if min(alike, summed, abs(total / len(known) - true)) <= allowed:
            return None
        return _Leaves(None, (), None, 0, 0, min(alike, summed), allowed)

    def _gradient(self, part: Recording, key: Key) -> Tensor | None:
        """Return a rank's gradient; zeros if the rank has the output, but no gradient reached it."""
        found, value = part.gradients.get(key), part.values.get(key)
        return torch.zeros_like(value) if found is None and value is not None and part.gradients else found

    def _find_factor(self, keys: list[Key]) -> None:
        """Set `factor` to P if the first gradient is P times the true one, as before a mean over ranks."""
        P = self.plan.P
        for key in keys:
            dots, squares = 0.0, 0.0
            whole = self.truth.gradients[key]
            for part, index in zip(self.parts, self.indices, strict=True):
                x = part.gradients.get(key)
                place = (
                    None
                    if x is None or index is None
                    else place_of(whole, x, (len(self.truth.tokens), len(index)), self.plan.rows)
                )
                if x is None or index is None or place is None:
                    continue
                true = place.tokens(whole, index.clamp(min=0))
                dots, squares = (
                    dots + float((place.tokens(x).double() * true).sum()),
                    squares + float(true.square().sum()),
                )
            if squares:
                if abs(dots / squares / P - 1) < 0.01:
                    self.factor = P
                    self.notes.append(
                        f"gradients are {P} times those of one process, as for a mean over ranks afterwards"
                    )
                return

    # Words.

    def _difference(self, stage: str, key: Key, found: _Leaves, text: str) -> Difference:
        return Difference(
            stage,
            key.module,
            key.what,
            found.rank,
            found.ranks,
            found.token,
            found.error,
            found.allowed,
            text,
        )

    def _said(self, found: _Leaves) -> str:
        ratio = (
            f"{found.error / found.allowed:.3g} times its bound"
            if found.allowed
            else f"{found.error:.2g} for 0"
        )
        if found.rank is None:
            return f"by {ratio}, whether each rank's own, their sum or their mean is taken"
        others = tuple(rank for rank in found.ranks if rank != found.rank)
        where = f"on rank {found.rank}" + (f" and on {_ranks(others)}" if others else "")
        if found.token is None:
            return f"{where}, by {ratio}"
        whose = (
            f"of the {found.length} tokens of rank {found.rank}"
            if others
            else f"of its {found.length} tokens"
        )
        return f"{where} from {self.plan.place(found.token)} on, {found.count} {whose}, by {ratio}"

    def _more(self, names: list[str]) -> str:
        names = [*dict.fromkeys(names)]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return (
            f". So {'does' if len(names) == 1 else 'do'} {', '.join(names[:_SHOWN])}{more}" if names else ""
        )

    def _look(self, key: Key, found: _Leaves) -> str:
        """Return the sentence on what to look at for an input or an output."""
        kind = self.truth.settings.get(key.module, {}).get("class", "")
        parent = self.truth.parents.get(key.module, "")
        if found.rank is None:
            return "Look at the labels and at the number by which the loss is divided; the gradient says for which tokens."
        if key.what.startswith("input "):
            inside = f"{self.truth.settings[parent]['class']} ({parent})" if parent else STEP
            last = self._last_before(key, parent)
            between = f"between {last} and {key.module}" if last else f"before it calls {key.module}"
            said = f"Look at what {inside} computes {between}"
        else:
            said = f"Its inputs agree, so look at {kind} itself"
        facts = [
            *self._facts(key, found),
            *(
                self._facts(Key(parent, key.call, ""), found)
                if key.what.startswith("input ") and parent
                else []
            ),
        ]
        return f"{said}: {'; '.join(facts)}." if facts else f"{said}."

    def _look_back(self, key: Key, before: Key | None, found: _Leaves) -> str:
        """Return the sentence on what to look at for a gradient. before: the output whose gradient agrees."""
        if before is not None:
            return f"The gradients of later outputs agree, down to {before}, so look at the backward of what takes {key}."
        facts = [
            fact
            for name in self.truth.parents
            if not self.truth.parents[name]
            for fact in self._numbers(name, found)
        ]
        said = "Look at the loss: at its labels, which are shifted before the sequence is cut, and at the number by which it is divided"
        return f"{said}: {'; '.join(facts)}." if facts else f"{said}."

    def _facts(self, key: Key, found: _Leaves) -> Iterator[str]:
        """Yield other differences of a module on the rank: in dtype, settings, weights, integer inputs."""
        part = self.parts[found.rank or 0]
        x, plain = part.values.get(key), self.plain.values.get(key)
        usual = torch.float64 if self.share < 1 else plain.dtype if plain is not None else None
        if x is not None and x.dtype != usual:
            yield f"it is {_word(x.dtype)} there, and {_word(usual)} on one process"
        mine, theirs = part.settings.get(key.module, {}), self.plain.settings.get(key.module, {})
        for name in theirs:
            if name in mine and mine[name] != theirs[name]:
                yield f"its {name} is {mine[name]} there, and {theirs[name]} on one process"
        weights = [name for name in self.plain.weights if name.rpartition(".")[0] == key.module]
        for name in weights:
            if name in part.weights and not same(part.weights[name], self.plain.weights[name]):
                yield f"its {name.rpartition('.')[2]} differs there"
        yield from self._numbers(key.module, found)

    def _numbers(self, module: str, found: _Leaves) -> Iterator[str]:
        """Yield the module's integer inputs that differ at the first token whose error exceeds its bound."""
        rank = found.rank or 0
        index, positions = self.indices[rank], self.parts[rank].positions
        for key, whole in self.truth.values.items():
            x = self.parts[rank].values.get(key)
            if key.module != module or not key.what.startswith("input ") or whole.is_floating_point():
                continue
            place = (
                None
                if x is None or index is None
                else place_of(whole, x, (len(self.truth.tokens), len(index)), self.plan.rows)
            )
            if x is None or index is None or place is None or positions is None:
                continue
            at = [i for i, token in enumerate(positions.tolist()) if token == found.token and index[i] >= 0]
            for i in at[:1]:
                mine, theirs = (
                    place.tokens(x)[i].flatten().tolist(),
                    place.tokens(whole)[int(index[i])].flatten().tolist(),
                )
                if mine != theirs:
                    yield f"its {key.what.removeprefix('input ')} is {_few(mine)} at that token, and {_few(theirs)} on one process"

    def _last_before(self, key: Key, parent: str) -> str:
        """Return the module that `parent` called last before the call of `key`, or ""."""
        last = ""
        for each in self.truth.values:
            if each == key:
                break
            if (
                each.what.startswith("output")
                and self.truth.parents.get(each.module) == parent
                and each.module != key.module
            ):
                last = each.module
        return last


def _away(x: Tensor, whole: Tensor) -> Float[Tensor, "..."]:
    """Return the absolute difference of each pair of entries: 0 for equal infinities, infinite for one NaN."""
    a, b = x.double(), whole.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, torch.zeros_like(a), (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf))


def _largest(x: Tensor) -> float:
    known = x[~x.isnan()]
    return float(known.max()) if known.numel() else 0.0


def _scale(x: Tensor) -> float:
    """Return the largest finite magnitude; an infinite one, as in a mask, would allow every error."""
    return _largest(x[x.isfinite()].abs())


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _word(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _few(numbers: list[Any]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else str(numbers)
