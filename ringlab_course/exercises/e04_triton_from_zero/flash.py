"""Exercise 04: the checks of the two attention kernels.

Buffers have room for more than S tokens. After the first S tokens, q, k and v contain other numbers or NaN,
and out and lse contain canaries. The judge's process compares values, canaries and NaN. It also finds hidden
tiles that are computed, because V is NaN in these tiles, and 0 · NaN is NaN. The process that runs the kernel
counts how often K is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringlab import oracle
from ringlab_course.checking.answers import bound_from, expect_array, expect_tuple, relative_error
from ringlab_course.checking.emulated import Emulated, compare_emulated
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.numbers import largest, rounding
from ringlab_course.exercises.e04_triton_from_zero import flash_mistakes as mistakes
from ringlab_course.exercises.e04_triton_from_zero.records import (
    CANARY,
    CAUSAL,
    CAUSAL_VARIANTS,
    FLASH,
    FLASH_VARIANTS,
    LSE,
    empty_loads,
    expect_each_once,
    named,
    reads_of,
    tiles_read,
)

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

NAMES = ("out", "lse")
State = tuple[np.ndarray, np.ndarray]


class Case(NamedTuple):
    """One input.

    `shift` is None for attention without a mask; `junk` multiplies k and v after the tokens in use.
    """

    S: int
    m: int = 16
    n: int = 16
    H: int = 2
    K: int = 1
    D: int = 16
    shift: int | None = None
    dtype: torch.dtype = torch.float32
    gain: float = 1.0
    slope: float = 0.0
    lift: float = 0.0
    junk: float = 1.0

    @property
    def label(self) -> str:
        """Return the case in words, for the counterexample."""
        dtype = "" if self.dtype == torch.float32 else f", {self.dtype}".replace("torch.", "")
        shift = "" if self.shift is None else f", shift={self.shift}"
        heads = f"{self.H} query heads, {self.K} key head{'' if self.K == 1 else 's'}"
        return f"{heads}, S={self.S}, D={self.D}, block_m={self.m}, block_n={self.n}{shift}{dtype}"

    @property
    def group(self) -> int:
        """Return the number of query heads that share a key head."""
        return self.H // self.K

    @property
    def blocks(self) -> int:
        """Return the number of blocks that hold the packed rows of one key head."""
        return -(-self.S * self.group // self.m)

    @property
    def capacity(self) -> int:
        """Return the number of rows of a buffer, which has one block more than S tokens need."""
        block = max(self.m, self.n)
        return -(-self.S // block) * block + block

    @property
    def how(self) -> tuple[int, ...]:
        """Return the integers that follow the buffers in the call."""
        return (self.S, *(() if self.shift is None else (self.shift,)), self.m, self.n)

    @property
    def mistakes(self) -> tuple[Any, ...]:
        """Return the misconceptions about out that this case may show."""
        return (*FLASH, *FLASH_VARIANTS) if self.shift is None else (*CAUSAL, *CAUSAL_VARIANTS)

    def stop(self, block: int) -> int:
        """Return the first key that is hidden from all rows of a block."""
        last = min(self.S - 1, ((block + 1) * self.m - 1) // self.group)
        return self.S if self.shift is None else max(0, min(self.S, last + self.shift + 1))

    def tiles(self, block: int) -> int:
        """Return the number of key tiles that a block has to visit."""
        return -(-self.stop(block) // self.n)


def buffers(case: Case, rng: np.random.Generator) -> list[Tensor]:
    """Return q, k, v and out, each (H or K, capacity, D), and lse, (H, capacity) in float32.

    `gain` multiplies q. The scores rise by `slope` from the first key to the last. `lift` is added to v.
    """
    heads = (case.H, case.K, case.K)
    q, k, v = (
        torch.from_numpy(rng.standard_normal((count, case.capacity, case.D))).float() for count in heads
    )
    q, v = q * case.gain, v + case.lift
    if case.slope:
        q[..., 0] = case.D**0.5
        k[..., 0] = torch.linspace(0, case.slope, case.capacity)
    for x in (k, v):
        x[:, case.S :] *= case.junk
    q, k, v = (x.to(case.dtype) for x in (q, k, v))
    return [q, k, v, torch.full_like(q, CANARY), torch.full(q.shape[:2], CANARY)]


def values(*cases: Case) -> Callable[[Subject, np.random.Generator], None]:
    """Return a check that compares out and lse with the oracle. Cases are in order of size."""

    def run(subject: Subject, rng: np.random.Generator) -> None:
        def answers() -> Iterator[tuple[Case, list[Tensor], State]]:
            for case in cases:
                given = buffers(case, rng)
                yield case, given, _called(subject.call(*given, *case.how), given)

        compare(answers(), cases[0].mistakes)

    return run


def own(case: Case) -> Callable[[Subject, np.random.Generator], None]:
    """Return a check that memory after the tokens in use is not written and does not change the result."""

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
                    f"{case.label}; the buffers hold NaN after the last token"
                )

    return run


def reads(*cases: Case) -> Callable[[Subject, np.random.Generator], None]:
    """Return a check of loads and stores.

    Every element is stored once. A block loads q once, and loads only the tiles that it sees.
    """

    def run(subject: Subject, rng: np.random.Generator) -> None:
        for case in cases:
            _reads(subject, rng, case)

    return run


def _reads(subject: Subject, rng: np.random.Generator, case: Case) -> None:
    given = buffers(case, rng)
    recorded = subject.record(*given, *case.how)
    compare([(case, given, _called(recorded.answer, given))])
    rows = np.arange(case.H)[:, None] * case.capacity + np.arange(case.S)
    places = rows[..., None] * case.D + np.arange(case.D)
    without = named(case.mistakes, "computed_by_torch")
    expect_each_once(recorded, ("out_ptr",), places, without, case.label)
    expect_each_once(recorded, ("lse_ptr",), rows, without, case.label)
    most = reads_of(recorded, "q_ptr", case.H * case.capacity * case.D).max()
    if most > 1:
        raise named(case.mistakes, "q_loaded_again").failure(
            f"{case.label}: rows of q were loaded {most} times"
        )
    keys = np.arange(case.K)[:, None] * case.capacity + np.arange(case.S)
    inside = keys[..., None] * case.D + np.arange(case.D)
    wanted = sum(map(case.tiles, range(case.blocks)))
    elements = sum(min(case.S, case.tiles(block) * case.n) for block in range(case.blocks))
    apart = case._replace(H=1, K=1)
    for argument in ("k_ptr", "v_ptr"):
        loads = reads_of(recorded, argument, case.K * case.capacity * case.D)
        beyond = np.setdiff1d(np.flatnonzero(loads), inside)
        if len(beyond):
            raise named(case.mistakes, "reads_unmasked").failure(
                f"{case.label}: {argument[0]}, row {beyond[0] // case.D} of the buffer was loaded"
            )
        made = sum(tiles_read(recorded, argument).values()) / case.K
        if made > wanted or loads[inside].sum() > case.K * case.D * elements:
            alone = made == case.group * sum(map(apart.tiles, range(apart.blocks)))
            empty = empty_loads(recorded, argument) / case.K
            past = empty > 0 and made - empty == wanted
            why = "reads_past_the_end" if past else "heads_read_apart" if alone else "reads_too_often"
            raise named(case.mistakes, why).failure(
                f"{case.label}: {made:g} loads of {argument[0].upper()} for a key head, {wanted} are enough"
            )


def skipped(*cases: Case) -> Callable[[Subject, np.random.Generator], None]:
    """Return a check that a block skips tiles in which it sees no key. In these tiles V is NaN."""

    def run(subject: Subject, rng: np.random.Generator) -> None:
        noted = [_visits(subject, rng, case, first) for case in cases for first in range(0, case.S, case.n)]
        wasted = next((each for each in noted if any(each.visited)), None)
        if wasted:
            _expect_values(subject, wasted.case, rng)
            raise named(wasted.case.mistakes, _why_visited(noted)).failure(wasted.text)

    return run


class Visits(NamedTuple):
    """For each block that sees no key from `first` on, in order: whether it computed with such keys."""

    case: Case
    first: int
    visited: list[bool]

    @property
    def text(self) -> str:
        """Return the counterexample."""
        tokens = len(self.visited) * self.case.m // self.case.group
        return (
            f"{self.case.label}: tokens 0 to {min(self.case.S, tokens) - 1} see no key from {self.first} on, "
            "but came out NaN, at least in part, when V was NaN there"
        )


def _visits(subject: Subject, rng: np.random.Generator, case: Case, first: int) -> Visits:
    """Fill V with NaN from key `first` on, and find the blocks that compute with these keys but see none of them.

    Their results contain NaN. Raises: Failure if no result contains NaN but numbers are wrong.
    """
    blocks = sum(case.stop(block) <= first for block in range(case.blocks))
    rows = min(case.S, blocks * case.m // case.group)
    if not rows:
        return Visits(case, first, [])
    given = buffers(case, rng)
    clean = [x.clone() for x in given]
    given[2][:, first:] = math.nan
    out = _called(subject.call(*given, *case.how), given)[0][:, :rows]
    size = case.m // case.group
    visited = [bool(np.isnan(out[:, at : at + size]).any()) for at in range(0, rows, size)]
    truth = truth_of(clean, case)[0][:, :rows]
    bound = bound_of(mistakes.plain(*clean, case.S, case.shift)[0][:, :rows], truth)
    if not any(visited) and relative_error(out, truth) > bound:
        _expect_values(subject, case, rng)
        raise Failure("out: wrong values.", case.label)
    return Visits(case, first, visited)


def _why_visited(noted: list[Visits]) -> str:
    """Return the name of the mistake that explains, in all cases, which hidden tiles were computed."""

    def explained(visit: Callable[[Case, int, int], bool]) -> bool:
        return all(
            each.visited == [visit(each.case, each.first, block) for block in range(len(each.visited))]
            for each in noted
        )

    if explained(lambda case, first, block: first == 0):
        return "visits_the_first_tile"
    if explained(
        lambda case, first, block: ((block + 1) * case.m - 1) // case.group + (case.shift or 0) >= first
    ):
        return "last_token_not_there"
    if explained(lambda case, first, block: (block + 1) * case.m + (case.shift or 0) > first):
        return "stops_at_the_packed_row"
    return "visits_hidden_tiles"


def _expect_values(subject: Subject, case: Case, rng: np.random.Generator) -> None:
    """Raise Failure if the values are wrong, because then they are the mistake to report."""
    given = buffers(case, rng)
    compare([(case, given, _called(subject.call(*given, *case.how), given))])


def truth_of(given: list[Tensor], case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of the tokens in use, in float64."""
    q, k, v = (x[None, :, : case.S] for x in given[:3])
    mask = None if case.shift is None else mistakes.visible_pairs(case.S, case.shift).numpy()
    out, lse = oracle.attention(q, k, v, mask=mask)
    return out[0], lse[0]


def bound_of(plain: Tensor, truth: np.ndarray) -> float:
    """Return the allowed difference between out and the truth, relative to the truth's largest element."""
    return max(bound_from(plain, truth), rounding(truth, 32))


def compare(answers: Iterable[tuple[Case, list[Tensor], State]], known: tuple[Any, ...] = ()) -> None:
    """Compare first out and then lse with the oracle's, in all cases, on the rows in use.

    known: the mistakes about out.
    """
    seen: list[tuple[Case, list[Tensor], State]] = []

    def noted() -> Iterator[Emulated]:
        for each in answers:
            seen.append(each)
            yield _answered(*each, part=0)

    compare_emulated(noted(), known)
    compare_emulated([_answered(*each, part=1) for each in seen], LSE if known else ())


def _answered(case: Case, given: list[Tensor], answer: State, part: int) -> Emulated:
    """Return the case for `compare_emulated`: out if `part` is 0, lse if `part` is 1."""
    truth = truth_of(given, case)
    plain = mistakes.plain(*given, case.S, case.shift)
    q, k = given[0][:, : case.S].float(), mistakes.values_of(given[0], given[1], case.S)
    size = 2 * largest(q.abs() @ k.abs().mT) * case.D**-0.5  # a score's rounding error is eps times this
    bounds = max(bound_of(plain[0], truth[0]), rounding(truth[0], size)), rounding(truth[1], size)
    inputs = (*given, case.S, case.shift, case.m, case.n)
    return Emulated(answer[part][:, : case.S], truth[part], bounds[part], (NAMES[part],), case.label, inputs)


def _called(answer: Any, given: list[Tensor]) -> State:
    out, lse = expect_tuple(answer, NAMES)
    return (
        expect_array(out, given[3].shape, name="out", dtype=given[3].dtype),
        expect_array(lse, given[4].shape, name="lse", dtype=given[4].dtype),
    )
