"""The inputs of exercise 17, the true results with derived bounds, and rings with mistakes in float64 NumPy.

With bfloat16 inputs, a result may be off by one rounding, and the dtypes of messages are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ringlab import oracle
from ringlab.conformance import tolerance
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab_course.checking.answers import compare_with
from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.emulated import Emulated, compare_emulated
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.mesh import HOST

if TYPE_CHECKING:
    from ringlab_course.mesh.examine import Examined

from dataclasses import replace

from ringlab.layout import zigzag
from ringlab_course.checking.answers import relative_error
from ringlab_course.mesh.examine import Examined

mistake = mistakes_of("17.forward")

D = 8
FORWARD, ALL = ("out", "lse"), ("out", "lse", "dq", "dk", "dv")
Parts = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Case:
    """q, k, v and cotangents in the order of the text, and the positions that each device owns."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    positions: np.ndarray
    text: str
    window: int | None = None

    @property
    def ranks(self) -> int:
        return len(self.positions)

    @property
    def length(self) -> int:
        return self.positions.shape[1]

    @cached_property
    def visible(self) -> np.ndarray:
        """Return a mask (S, S) that is True where a query sees a key."""
        index = np.arange(self.positions.size)
        return sees(self.window)(index, index)

    @cached_property
    def true(self) -> tuple[np.ndarray, ...]:
        """Return the oracle's out, lse, dq, dk and dv in float64."""
        out, lse = oracle.attention(self.q, self.k, self.v, mask=self.visible)
        return out, lse, *self.gradients(self.dlse.numpy())

    def gradients(self, dlse: np.ndarray, dout: Tensor | np.ndarray | None = None) -> Parts:
        """Return the oracle's dq, dk and dv for this cotangent of lse.

        dout: the cotangent of out, or None for that of the case.
        """
        dout = self.dout if dout is None else dout
        return tuple(
            oracle.gradients(self.q, self.k, self.v, dout, mask=self.visible, dlse=oracle.float64(dlse))
        )

    def bound(self, gradients: bool) -> float:
        """Return the allowed relative error, which is the largest one allowed for any of the results.

        `tolerance` takes only dout into account. Gradients are linear in (dout, dlse). The part from dlse may
        have twice the error of the plainest implementation, plus the change from storing lse in float32.
        """
        parts = (self.q, self.k, self.v, self.dout)
        held = tolerance.bounds(*parts, mask=Mask(window=self.window))
        if not gradients:
            return max(held[name] for name in FORWARD)
        zero, dlse = np.zeros(self.true[0].shape), oracle.float64(self.dlse)
        alone, of_dout = self.gradients(dlse, zero), self.gradients(np.zeros(dlse.shape))
        state = float(np.finfo(np.float32).eps)
        moved = self.gradients(np.abs(dlse) * state * (1 + np.abs(self.true[1]) / 2), zero)
        for name, plain, right, main, move, total in zip(
            ALL[2:], self._plain_of_lse(), alone, of_dout, moved, self.true[2:], strict=True
        ):
            error = held[name] * _largest(main) + tolerance.FACTOR * _largest(plain - right) + _largest(move)
            held[name] = error / (_largest(total) or 1.0) + torch.finfo(self.q.dtype).eps
        return max(held.values())

    def _plain_of_lse(self) -> list[np.ndarray]:
        """Return the gradients of Σ dlse · lse by autograd, in the dtype of q."""
        leaves = [x.detach().clone().requires_grad_() for x in (self.q, self.k, self.v)]
        with torch.enable_grad():
            scores = leaves[0] @ leaves[1].mT * self.q.shape[-1] ** -0.5
            lse = scores.masked_fill(~torch.from_numpy(self.visible), -torch.inf).float().logsumexp(-1)
            loss = (lse * self.dlse).sum() + 0 * leaves[2].sum()
        return [oracle.float64(x) for x in torch.autograd.grad(loss, leaves)]

    def dealt(self, x: np.ndarray, axis: int = 2) -> np.ndarray:
        """Return x in the order in which devices own the tokens, from x in the order of the text."""
        return np.take(x, self.positions.ravel(), axis=axis)

    def in_order(self, x: np.ndarray) -> np.ndarray:
        """Return x in the order of the text, from x in the order in which devices own the tokens."""
        return np.take(x, np.argsort(self.positions.ravel()), axis=2)

    def given(self) -> list[np.ndarray]:
        """Return q, k and v as the learner's program gets them, in float32."""
        return [self.dealt(x.float().numpy()) for x in (self.q, self.k, self.v)]

    def cotangents(self) -> list[np.ndarray]:
        """Return dout and dlse as the learner's program gets them, in float32."""
        return [self.dealt(x.float().numpy()) for x in (self.dout, self.dlse)]


def case(
    rng: np.random.Generator,
    deal: Layout | np.ndarray,
    name: str = "",
    *,
    window: int | None = None,
    size: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Return a problem of one sequence and two heads on this layout or on these positions."""
    if isinstance(deal, Layout):
        name, deal = name or deal.name, np.stack([deal.positions(rank) for rank in range(deal.P)])
    shape = (1, 2, deal.size, D)
    q, k, v, dout = (torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for _ in range(4))
    dlse = torch.from_numpy(rng.standard_normal(shape[:-1]).astype(np.float32))
    narrow = ", bfloat16" if dtype == torch.bfloat16 else ""
    text = f"P={len(deal)}, {deal.shape[1]} tokens on each device, {name}{narrow}"
    text += f", window of {window}" if window else ""
    q, k, v = ((size * q).to(dtype), (size * k).to(dtype), v.to(dtype))
    return Case(q, k, v, dout.to(dtype), dlse, deal, text, window)


def shuffled(rng: np.random.Generator, P: int, L: int) -> np.ndarray:
    """Return positions dealt at random. Each device has its positions in ascending order."""
    return np.sort(rng.permutation(P * L).reshape(P, L), axis=1)


def sees(window: int | None) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function that makes the causal mask, with or without a window, from positions of queries and keys."""

    def mask(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        age = queries[:, None] - keys
        return (age >= 0) if window is None else (age >= 0) & (age < window)

    return mask


def furthest(positions: np.ndarray, window: int | None) -> int:
    """Return the most hops that a block makes to reach a device that needs it."""
    P, mask = len(positions), sees(window)
    return max(
        step for step in range(P) for rank in range(P)
        if step == 0 or mask(positions[rank], positions[(rank - step) % P]).any()
    )  # fmt: skip


def walk(
    given: Case,
    *,
    steps: Callable[[Case], Iterable[int]] = lambda given: range(given.ranks),
    here: Callable[[int, int, int], int | None] = lambda rank, step, P: (rank - step) % P,
    believed: Callable[[int, int, int], int] = lambda rank, step, P: (rank - step) % P,
    mask: Callable[[Case, int, int], np.ndarray] | None = None,
) -> Parts:
    """Return (out, lse) of a right or wrong ring in float64, in the order of devices.

    steps: the steps in which devices compute. here: the owner of the block that a rank has in a step, or None
    for a block of zeros. believed: the rank whose positions the mask assumes for this block. mask: returns the
    mask of a rank's queries and the keys at those positions; None for the right mask.
    """
    q, k, v = (np.split(oracle.float64(x), given.ranks, axis=2) for x in given.given())
    outs, lses = [], []
    for rank in range(given.ranks):
        keys, values, masks = [], [], []
        for step in steps(given):
            origin, assumed = here(rank, step, given.ranks), believed(rank, step, given.ranks)
            keys.append(np.zeros_like(k[0]) if origin is None else k[origin])
            values.append(np.zeros_like(v[0]) if origin is None else v[origin])
            right = sees(given.window)(given.positions[rank], given.positions[assumed])
            masks.append(right if mask is None else mask(given, rank, assumed))
        if keys:
            out, lse = oracle.attention(
                q[rank],
                np.concatenate(keys, 2),
                np.concatenate(values, 2),
                mask=np.concatenate(masks, 1),
                scale=D**-0.5,
            )
        else:
            out, lse = np.zeros(q[rank].shape), np.full(q[rank].shape[:-1], -np.inf)
        outs.append(out)
        lses.append(lse)
    return np.concatenate(outs, 2), np.concatenate(lses, 2)


def look(
    subject: Any, given: Case, named: dict[str, Misconception], *, gradients: bool = False, run: bool = True
) -> Examined:
    """Return the outcome of the learner's program.

    Raises: Failure if it has none, named after the mistake if that is known.
    """
    keywords = {} if given.window is None else {"window": given.window}
    dtype = str(given.q.dtype).removeprefix("torch.")
    try:
        found = subject.examine(
            given.positions,
            given.given(),
            given.cotangents() if gradients else [],
            dtype=dtype,
            keywords=keywords,
            run=run,
        )
    except Crashed as crash:
        told = f"{crash.message} {crash.counterexample}"
        for error, name in RAISED.items():
            if error in told:
                raise TRACED[name].failure(f"{given.text}\n{crash.counterexample}".strip()) from None
        raise
    if found.fault:
        raise Failure("The answer of the program has the wrong form.", f"{given.text}: {found.fault}")
    if HOST & set(found.others):
        raise Failure(
            "The program calls Python while it runs. Send blocks between devices with lax.ppermute; nothing else is needed.",
            f"{given.text}: {', '.join(found.others)}",
        )
    if found.not_run:
        raise (named.get(found.not_run) or NOT_RUN[found.not_run]).failure(given.text)
    return found


def answers(
    subject: Any, cases: Iterable[Case], named: dict[str, Misconception], *, gradients: bool = False
) -> Iterator[Emulated]:
    """Yield each case's answer with its truth, in the order in which devices own the tokens."""
    names = ALL if gradients else FORWARD
    for given in cases:
        found = look(subject, given, named, gradients=gradients)
        right = tuple(map(given.dealt, given.true[: len(names)]))
        if gradients:
            _of_the_forward(found.results[:2], right[:2], given)
        yield Emulated(found.results, right, given.bound(gradients), names, given.text, (given,))


def _of_the_forward(answer: Parts, truth: Parts, given: Case) -> None:
    """Raise Failure if out and lse are wrong, because then the gradients are wrong for the same reason."""
    try:
        compare_with(answer, truth, bound=given.bound(True), names=FORWARD, case=given.text)
    except Failure as failure:
        raise Failure(
            "out and lse are already wrong, before any gradient. `keep` returns them from `ring_forward`: mend 17.forward first.",
            failure.counterexample,
        ) from None


def verify(
    subject: Any, cases: Sequence[Case], mistakes: Sequence[Misconception], *, gradients: bool = False
) -> None:
    """Raise the Failure of the first wrong answer, with the name of a mistake that explains all answers."""
    named = {each.name: each for each in mistakes}
    compare_emulated(answers(subject, cases, named, gradients=gradients), mistakes)


def expect_values(found: Examined, given: Case, *, gradients: bool = False) -> None:
    """Raise Failure if a run whose cost is counted has wrong values."""
    names = ALL if gradients else FORWARD
    truth = tuple(map(given.dealt, given.true[: len(names)]))
    rounded = given.ranks * ROUNDING if given.q.dtype == torch.bfloat16 else 0.0
    bound = max(given.bound(gradients), rounded)
    compare_with(found.results, truth, bound=bound, names=names, case=given.text)


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0.0))


RAISED = {
    "TracerBoolConversionError": "asks_by_if",
    "ConcretizationTypeError": "asks_by_if",
    "TracerIntegerConversionError": "numpy_by_tracer",
    "TracerArrayConversionError": "numpy_by_tracer",
}
"""Errors that JAX raises while it traces a program, and the mistake behind each of them."""
TRACED = {
    "asks_by_if": mistake("asks_by_if"),
    "numpy_by_tracer": mistake("numpy_by_tracer"),
}
"""The mistakes that make JAX stop while it traces a program, in any stage."""
NOT_RUN = {
    "branch": mistake("branch"),
    "turns": mistake("turns"),
}  # fmt: skip


L = 4
ROUNDING = float(torch.finfo(torch.bfloat16).eps) / 2
"""The largest relative change of a number that is stored in bfloat16, which has 8 significant bits: 2⁻⁸."""


def narrow_case(rng: np.random.Generator, P: int) -> Case:
    """Return a zig-zag problem with q, k, v and dout in bfloat16.

    Its truth is computed from the rounded numbers.
    """
    return case(rng, zigzag(L * P, P), dtype=torch.bfloat16)


def verify_narrow(
    subject: Any, given: Case, named: dict[str, Misconception], *, gradients: bool = False
) -> None:
    """Raise Failure for results that have the wrong type or were rounded more than once."""
    found = look(subject, given, named, gradients=gradients)
    names = ALL if gradients else FORWARD
    _expect_types(found, names, given)
    truth = tuple(map(given.dealt, given.true[: len(names)]))
    # A ring that rounds its state on each of the P devices is off by at most P roundings. A larger error is
    # another mistake.
    compare_with(found.results, truth, bound=given.ranks * ROUNDING, names=names, case=given.text)
    parts = {"q": given.q.float(), "k": given.k.float(), "v": given.v.float(), "dout": given.dout.float()}
    exact = replace(given, **parts).bound(gradients)
    for name, got, right in zip(names, found.results, truth, strict=True):
        if name in FORWARD and relative_error(got, right) > exact:
            told = f"{given.text}: {name} is off by {relative_error(got, right):.1e}, float32 by {exact:.1e} at most"
            raise named["rounds_on_the_way"].failure(told)
        if name not in FORWARD and (off := roundings(got, right, exact)) > tolerance.FACTOR:
            told = f"{given.text}: one number of {name} is off by {off:.1f} roundings to bfloat16; rounding once gives at most 1"
            raise named["rounds_on_the_way"].failure(told)


def roundings(got: np.ndarray, right: np.ndarray, exact: float) -> float:
    """Return the error of the worst number in roundings to bfloat16, without the error that float32 may have.

    A program that computes g in float32 has a result ĝ with |ĝ − g| ≤ e = exact · max |g|. Here `exact` is
    the bound of the same numbers in float32. Rounding ĝ once, at the end, adds an error of 2⁻⁸ |ĝ|. Together
    that is 2⁻⁸ |g| + e, if 2⁻⁸ e is neglected. So the returned number is 1 at most, and FACTOR is allowed, as
    in all checks. A sum that is rounded before its end has an error of 2⁻⁸ times an intermediate sum. If
    terms cancel, that is many times 2⁻⁸ |g|.
    """
    beyond = np.maximum(np.abs(got - right) - exact * np.abs(right).max(), 0)
    return float((beyond / np.maximum(ROUNDING * np.abs(right), np.finfo(np.float64).tiny)).max())


def _expect_types(found: Examined, names: tuple[str, ...], given: Case) -> None:
    """Raise Failure unless out and lse are float32 and gradients have the type of q, k and v."""
    for name, dtype in zip(names, found.dtypes, strict=False):
        if name in FORWARD and dtype != "float32":
            raise Failure(f"{name} should be float32, whatever q is.", f"{given.text}: {dtype}")
        if name not in FORWARD and dtype != "bfloat16":
            raise Failure(
                f"{name} should have the type of q, k and v: round it once, at the very end.",
                f"{given.text}: {dtype}",
            )


def expect_told(found: Examined, given: Case) -> None:
    """Raise Failure if a message is neither bfloat16, float32 nor an integer, or if its type is unknown."""
    told = f"{given.text}: {', '.join(sorted(found.types)) or 'nothing'} on the wire"
    if found.untold:
        raise Failure(
            "A message is inside a lax.while_loop whose number of turns cannot be read, so the types of the messages cannot be counted. Use lax.scan, or "
            "lax.fori_loop with Python numbers.",
            told,
        )
    if any(not kind.startswith(("bfloat16", "float32", "int", "uint")) for kind in found.types):
        raise Failure(
            "A message has a type other than float32 and the type of q, k and v. Send K and V as they came, and gradients in float32.",
            told,
        )
