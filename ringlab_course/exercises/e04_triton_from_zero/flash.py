"""Exercise 04: the checks of the two attention kernels.

Tokens live in buffers with room for more; behind the S tokens in use stand other numbers, or NaN, and
out and lse hold canaries. Values, canaries and NaN are seen on the judge's side. That a hidden tile is
not computed is too: where its V is NaN, 0 · NaN would tell. How often K is read is counted where the
kernel runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringlab import oracle
from ringlab_course.checking.answers import (
    bound_from,
    compare_with,
    expect_array,
    expect_tuple,
    relative_error,
)
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.numbers import largest, rounding
from ringlab_course.exercises.e04_triton_from_zero import flash_mistakes as mistakes
from ringlab_course.exercises.e04_triton_from_zero.records import (
    CANARY,
    CAUSAL,
    FLASH,
    LSE,
    expect_each_once,
    named,
    reads_of,
    tiles_read,
)

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

NAMES = ("out", "lse")


class Case(NamedTuple):
    """One input; `shift` is None for attention without a mask, `junk` stands behind the tokens in use."""

    S: int
    m: int = 16
    n: int = 16
    H: int = 1
    D: int = 16
    shift: int | None = None
    dtype: torch.dtype = torch.float32
    gain: float = 1.0
    slope: float = 0.0
    lift: float = 0.0
    junk: float = 1.0

    @property
    def label(self) -> str:
        """The case in words, for the counterexample."""
        heads = "" if self.H == 1 else f"{self.H} heads, "
        dtype = "" if self.dtype == torch.float32 else f", {self.dtype}".replace("torch.", "")
        shift = "" if self.shift is None else f", shift={self.shift}"
        return f"{heads}S={self.S}, D={self.D}, block_m={self.m}, block_n={self.n}{shift}{dtype}"

    @property
    def capacity(self) -> int:
        """Rows of a buffer: at least one block more than whole blocks need."""
        block = max(self.m, self.n)
        return -(-self.S // block) * block + block

    @property
    def how(self) -> tuple[int, ...]:
        """The numbers that follow the buffers in the call."""
        return (self.S, *(() if self.shift is None else (self.shift,)), self.m, self.n)

    @property
    def mistakes(self) -> tuple[Any, ...]:
        """The misconceptions about out that this case may show."""
        return FLASH if self.shift is None else CAUSAL


def buffers(case: Case, rng: np.random.Generator) -> list[Tensor]:
    """Return q, k, v, out, lse: (H, capacity, D), and lse (H, capacity) in float32.

    `gain` multiplies q; `slope` lets the scores rise by so much from the first key to the last;
    `lift` is added to v.
    """
    shape = (case.H, case.capacity, case.D)
    q, k, v = (torch.from_numpy(rng.standard_normal(shape)).float() for _ in range(3))
    q, v = q * case.gain, v + case.lift
    if case.slope:
        q[..., 0] = case.D**0.5
        k[..., 0] = torch.linspace(0, case.slope, case.capacity)
    for x in (k, v):
        x[:, case.S :] *= case.junk
    q, k, v = (x.to(case.dtype) for x in (q, k, v))
    return [q, k, v, torch.full_like(q, CANARY), torch.full(shape[:2], CANARY)]


def values(*cases: Case) -> Callable[[Subject, np.random.Generator], None]:
    """Return a check that compares out and lse with the oracle, the smallest case first."""

    def run(subject: Subject, rng: np.random.Generator) -> None:
        for case in cases:
            given = buffers(case, rng)
            compare(_called(subject.call(*given, *case.how), given), given, case)

    return run


def own(case: Case) -> Callable[[Subject, np.random.Generator], None]:
    """Return a check that nothing behind the tokens in use is written, or read into the result."""

    def run(subject: Subject, rng: np.random.Generator) -> None:
        given = buffers(case, rng)
        for name, part in zip(NAMES, _called(subject.call(*given, *case.how), given), strict=True):
            lost = np.argwhere(part[:, case.S :] != CANARY)
            if len(lost):
                _expect_values(subject, case._replace(junk=1.0), rng)
                place = ", ".join(map(str, (lost[0][0], lost[0][1] + case.S, *lost[0][2:])))
                raise named(case.mistakes, "stores_unmasked").failure(
                    f"{case.label}: {name}[{place}] was overwritten"
                )
            if np.isnan(part[:, : case.S]).any():
                _expect_values(subject, case._replace(junk=1.0), rng)
                raise named(case.mistakes, "junk_times_zero").failure(
                    f"{case.label}; NaN stands behind the last token"
                )

    return run


def reads(case: Case, tiles: Callable[[int], int]) -> Callable[[Subject, np.random.Generator], None]:
    """Return a check that kernels store every element once, and that query block i loads q once, K `tiles(i)` times."""

    def run(subject: Subject, rng: np.random.Generator) -> None:
        given = buffers(case, rng)
        recorded = subject.record(*given, *case.how)
        compare(_called(recorded.answer, given), given, case)
        rows = np.arange(case.H)[:, None] * case.capacity + np.arange(case.S)
        places = rows[..., None] * case.D + np.arange(case.D)
        without = named(case.mistakes, "computed_by_torch")
        expect_each_once(recorded, ("out_ptr",), places, without, case.label)
        expect_each_once(recorded, ("lse_ptr",), rows, without, case.label)
        size = case.H * case.capacity * case.D
        most = reads_of(recorded, "q_ptr", size).max()
        if most > 1:
            raise named(case.mistakes, "q_loaded_again").failure(
                f"{case.label}: rows of q were loaded {most} times"
            )
        wanted = sum(tiles(block) for block in range(-(-case.S // case.m)))
        for argument in ("k_ptr", "v_ptr"):
            loads = reads_of(recorded, argument, size)
            beyond = np.setdiff1d(np.flatnonzero(loads), places)
            if len(beyond):
                raise named(case.mistakes, "reads_unmasked").failure(
                    f"{case.label}: {argument[0]}, row {beyond[0] // case.D} of the buffer was loaded"
                )
            made = sum(tiles_read(recorded, argument).values()) / case.H
            if loads[places].sum() > _elements(case, tiles) or made > wanted:
                raise named(case.mistakes, "reads_too_often").failure(
                    f"{case.label}: {made:g} loads of {argument[0].upper()} for a head, {wanted} are enough"
                )

    return run


def skipped(*cases: Case) -> Callable[[Subject, np.random.Generator], None]:
    """Return a check that a query block leaves tiles alone in which it sees nothing: V is NaN there."""

    def run(subject: Subject, rng: np.random.Generator) -> None:
        for case in cases:
            for first in range(case.n, case.S, case.n):
                given = buffers(case, rng)
                before = [block for block in range(-(-case.S // case.m)) if _stop(case, block) <= first]
                rows = min(case.S, len(before) * case.m)
                if not rows:
                    continue
                clean = [x.clone() for x in given]
                given[2][:, first:] = math.nan
                out = _called(subject.call(*given, *case.how), given)[0][:, :rows]
                truth = truth_of(clean, case)[0][:, :rows]
                if np.isnan(out).any():
                    _expect_values(subject, case, rng)
                    raise named(case.mistakes, "visits_hidden_tiles").failure(
                        f"{case.label}: rows 0 to {rows - 1} see no key from {first} on, and came out NaN when V was NaN there"
                    )
                if relative_error(out, truth) > bound_of(
                    mistakes.plain(*clean, case.S, case.shift)[0][:, :rows], truth
                ):
                    _expect_values(subject, case, rng)
                    raise Failure("out: wrong values.", case.label)

    return run


def _expect_values(subject: Subject, case: Case, rng: np.random.Generator) -> None:
    """Raise where the values are wrong to begin with: then that is the mistake, and not what would be said next."""
    given = buffers(case, rng)
    compare(_called(subject.call(*given, *case.how), given), given, case)


def truth_of(given: list[Tensor], case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of the tokens in use, in float64."""
    q, k, v = (x[None, :, : case.S] for x in given[:3])
    mask = None if case.shift is None else mistakes.visible_pairs(case.S, case.shift).numpy()
    out, lse = oracle.attention(q, k, v, mask=mask)
    return out[0], lse[0]


def bound_of(plain: Tensor, truth: np.ndarray) -> float:
    """Return how far out may be from the truth, relative to its largest element."""
    return max(bound_from(plain, truth), rounding(truth, 32))


def compare(answer: tuple[np.ndarray, np.ndarray], given: list[Tensor], case: Case) -> None:
    """Compare the rows in use of out, then of lse."""
    truth = truth_of(given, case)
    plain = mistakes.plain(*given, case.S, case.shift)
    q, k = (x[:, : case.S].float() for x in given[:2])
    size = 2 * largest(q.abs() @ k.abs().mT) * case.D**-0.5  # scores known to so many roundings
    bounds = max(bound_of(plain[0], truth[0]), rounding(truth[0], size)), rounding(truth[1], size)
    for i, (name, known) in enumerate(zip(NAMES, (case.mistakes, LSE), strict=True)):
        compare_with(
            answer[i][:, : case.S],
            truth[i],
            bound=bounds[i],
            misconceptions=known,
            inputs=(*given, case.S, case.shift, case.m, case.n),
            names=(name,),
            case=case.label,
        )


def _called(answer: Any, given: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    out, lse = expect_tuple(answer, NAMES)
    return (
        expect_array(out, given[3].shape, name="out", dtype=given[3].dtype),
        expect_array(lse, given[4].shape, name="lse", dtype=given[4].dtype),
    )


def _stop(case: Case, block: int) -> int:
    """The first key that no row of a query block sees."""
    last = min(case.S, (block + 1) * case.m) - 1
    return case.S if case.shift is None else max(0, min(case.S, last + case.shift + 1))


def tiles_of(case: Case) -> Callable[[int], int]:
    """Return the function that says how many tiles of keys a query block has to visit."""
    return lambda block: (
        -(-min(case.S, (block + 1) * case.m + (case.shift or 0)) // case.n)
        if case.shift is not None
        else -(-case.S // case.n)
    )


def _elements(case: Case, tiles: Callable[[int], int]) -> int:
    blocks = range(-(-case.S // case.m))
    return case.H * case.D * sum(min(case.S, tiles(block) * case.n) for block in blocks)
