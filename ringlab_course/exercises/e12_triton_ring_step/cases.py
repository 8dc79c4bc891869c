"""The inputs of exercise 12 with their right answers, and checks of recorded loads and stores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ringlab_course.checking.answers import (
    expect_array,
    expect_tuple,
    relative_error,
)
from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.emulated import Emulated
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.numbers import EPS, largest, rounding_bound
from ringlab_course.exercises.e12_triton_ring_step import mistakes
from ringlab_course.exercises.e12_triton_ring_step.emulate import (
    LOG2E,
    NOTHING,
    RESULT,
    STATE,
    State,
    Step,
    comparable,
    finished,
    nothing_seen,
    resumed,
    step,
    tile,
)

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Recorded


POISON = 777.0
"""The content of OUT and LSE before they are written. State and scales that must not be read hold NaN."""
STATE_NAMES = ("acc", "m", "total")
SAYS = ("acc / total", "m + log2(total)")
RESULT_NAMES = ("out", "lse")
BEGINS = {NOTHING: "with nothing seen", STATE: "from the state", RESULT: "from OUT and LSE"}
Block = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def random(rng: np.random.Generator, *shape: int, size: float = 1.0) -> torch.Tensor:
    """Return a float32 tensor of normal numbers."""
    return torch.from_numpy((size * rng.standard_normal(shape)).astype(np.float32))


def block(rng: np.random.Generator, *shape: int, size: float = 1.0) -> Block:
    """Return (k, ks, v, vs): int8 numbers of this shape (…, keys, D) and a float32 scale for each key."""
    parts: list[torch.Tensor] = []
    for scale in (size, 1.0):
        parts.append(torch.from_numpy(rng.integers(-127, 128, shape).astype(np.int8)))
        spread = (
            np.exp2(rng.uniform(-1.5, 1.5, shape[:-1])) * scale / 73
        )  # 73: the root mean square of uniform int8
        parts.append(torch.from_numpy(spread.astype(np.float32)))
    return parts[0], parts[1], parts[2], parts[3]


def widened(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the float32 keys or values that int8 numbers and their scales represent."""
    return numbers.float() * scales[..., None]


def scale2(D: int) -> float:
    """Return log2(e) / sqrt(D)."""
    return LOG2E / math.sqrt(D)


def memory(state: State) -> tuple[torch.Tensor, ...]:
    """Return a state in float32, as the kernels store it."""
    return tuple(torch.from_numpy(x.astype(np.float32)) for x in state)


def garbage(shape: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return the memory of a state before anything is written: NaN."""
    return tuple(torch.full(x.shape, math.nan) for x in memory(nothing_seen(shape)))


def poisoned(shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return OUT and LSE before anything is written, filled with POISON."""
    return torch.full(tuple(shape), POISON), torch.full(tuple(shape)[:-1], POISON)


@dataclass(frozen=True)
class Tiles:
    """Query rows and their tiles: each tile is a block and a mask of what the rows see.

    All tiles have the same size.
    """

    q: torch.Tensor
    tiles: Sequence[tuple[Block, torch.Tensor]]
    text: str

    def answer(self, wrong: Iterable[str] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Return the state after all tiles as (acc / total, m + log2 total)."""
        q = self.q.double().numpy()
        state = nothing_seen(q.shape)
        for parts, visible in self.tiles:
            k, ks, v, vs = (part.double().numpy() for part in parts)
            seen = visible.numpy() != 0
            state = tile(state, q, k, ks, v, vs, seen, scale2(q.shape[-1]), wrong)
        return comparable(state)


def with_key(state: State, value: np.ndarray) -> State:
    """Return the state after one more key, whose score is 1 in base 2."""
    top = np.maximum(state.m, 1.0)
    old, new = np.exp2(state.m - top), np.exp2(1.0 - top)
    return State(state.acc * old[..., None] + new[..., None] * value, top, state.total * old + new)


@dataclass(frozen=True)
class Ends:
    """The start of a step, which is a state or a result (out, lse), and the final result that must follow.

    more: the value of one more key, whose score is 1 in base 2, or None for no further key.
    """

    state: State | tuple[np.ndarray, np.ndarray]
    text: str
    more: np.ndarray | None = None

    def before(self, wrong: Iterable[str] = ()) -> State:
        """Return the state with which the step begins."""
        return self.state if isinstance(self.state, State) else resumed(*self.state, wrong)

    def answer(self, wrong: Iterable[str] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Return the final (out, lse)."""
        state = self.before(wrong)
        return finished(state if self.more is None else with_key(state, self.more), wrong)

    def bound(self) -> float:
        """Return the relative error that float32 may have in this case.

        lse is the sum of m · ln 2 and ln total, which are each off by a few roundings of their own size. If
        they cancel, the same error is a larger fraction of the largest lse.
        """
        state = self.before()
        seen = state.total > 0
        terms = math.log(2) * np.abs(state.m[seen]) + np.abs(np.log(state.total[seen])) + 1
        return 4 * EPS * max(2.0, largest(terms) / (largest(self.answer()[1]) or 1.0))


@dataclass(frozen=True)
class Chain:
    """The queries and the steps of a ring. Its answer can be compared after each step.

    start: the (out, lse) with which the first step begins, or None if it begins with no key seen.
    """

    q: torch.Tensor
    steps: Sequence[Step]
    text: str
    ends: bool = True
    start: tuple[np.ndarray, np.ndarray] | None = None
    memo: dict[tuple[str, ...], Any] = field(default_factory=dict, compare=False)

    def upto(self, count: int) -> Chain:
        """Return the chain of the first `count` steps."""
        ends = count == len(self.steps)
        text = f"{self.text}: after step {count - 1}"
        return Chain(self.q, self.steps[:count], text, ends, self.start)

    def answer(self, wrong: Iterable[str] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Return (out, lse) after the last step, or (acc / total, m + log2 total) after an earlier step."""
        key = tuple(wrong)
        if key not in self.memo:
            resumes = self.start is not None and "result_ignored" not in key
            state = resumed(*self.start, key) if resumes else nothing_seen(self.q.shape)
            for number, each in enumerate(self.steps):
                last = self.ends and number == len(self.steps) - 1
                carried = 0 < number and not last
                state = step(state, self.q, each, scale2(self.q.shape[-1]), key, carried=carried)
                if "normalises_every_step" in key and not last:
                    state = state._replace(acc=comparable(state)[0])
            self.memo[key] = finished(state, key) if self.ends else comparable(state)
        return self.memo[key]

    def bound(self) -> float:
        """Return the relative error that float32 may have here. It is doubled for logarithms in base 2."""
        k, v = (
            torch.cat([widened(*pair(each)).nan_to_num() for each in self.steps], 2)
            for pair in (lambda each: each[:2], lambda each: each[2:4])
        )
        if k.shape[2] == 0:
            return 4 * EPS * 8
        return 2 * rounding_bound(self.q, k, v, self.answer())


def answered(answer: Any, case: Any, bound: float, names: Sequence[str]) -> Emulated:
    """Return the learner's answer to the case. Raises: Failure for NaN in rows that saw no key."""
    parts, right = expect_tuple(answer, names), case.answer()
    got = [expect_array(part, r.shape, name=name) for part, r, name in zip(parts, right, names, strict=True)]
    unreal = np.isnan(got[0]).any(-1) | np.isnan(got[1])
    if (unreal & np.isneginf(right[1])).any():
        at_the_end = mistakes.DIVIDES_BY_ZERO if tuple(names) == RESULT_NAMES else mistakes.NAN_IN_BLIND_ROWS
        raise at_the_end.failure(case.text)
    return Emulated(tuple(got), right, bound, names, case.text, (case,))


def expect_state(parts: Sequence[Any], like: Sequence[torch.Tensor], text: str) -> tuple[torch.Tensor, ...]:
    """Return the state of an answer. Raises: Failure if its shape or dtype is wrong."""
    for part, wanted, name in zip(parts, like, STATE_NAMES, strict=True):
        expect_array(part, wanted.shape, name=name)
        if getattr(part, "dtype", None) is not torch.float32:
            raise Failure(f"{name} should be float32.", f"{text}: {name} is {getattr(part, 'dtype', None)}")
    return tuple(parts)


def expect_same(
    after: Sequence[Any], before: Sequence[torch.Tensor], mistake: Misconception, text: str
) -> None:
    """Raise `mistake` if memory that should not be written has changed."""
    for part, old in zip(after, before, strict=True):
        if not np.array_equal(expect_array(part, old.shape), expect_array(old, old.shape), equal_nan=True):
            raise mistake.failure(text)


def expect_written(out: Any, lse: Any, text: str) -> None:
    """Raise Failure if OUT or LSE still contains POISON."""
    for part, name in ((out, "out"), (lse, "lse")):
        left = expect_array(part, part.shape, name=name) == POISON
        if left.any():
            where = ", ".join(map(str, np.argwhere(left)[0]))
            raise mistakes.UNWRITTEN.failure(f"{text}: {name}[{where}] and {left.sum() - 1} more")


def rounded(state: Sequence[Any], case: Any) -> bool:
    """Return whether a state is nearly right and its acc or m contains only bfloat16 numbers."""
    says = comparable([np.asarray(part, np.float64) for part in state])
    near = relative_error(says, case.answer()) < 0.05
    return near and any(
        torch.equal(torch.as_tensor(x), torch.as_tensor(x).bfloat16().float()) for x in state[:2]
    )


def unnamed(failure: Failure, mistake: Misconception) -> Failure:
    """Return `failure`, named after `mistake` unless the failure has a name already."""
    return failure if failure.misconception else mistake.failure(failure.counterexample)


ORIGIN = (0, 0, 0)
STATE_POINTERS = ("ACC", "M", "TOTAL")
RESULT_POINTERS = ("OUT", "LSE")


def launches(recorded: Recorded) -> int:
    """Return the number of launches: how often program (0, 0, 0) began. Programs run one after the other."""
    programs = [tuple(access.program) for access in recorded.accesses]
    before = [None, *programs[:-1]]
    return sum(now == ORIGIN and was != ORIGIN for was, now in zip(before, programs, strict=True))


def expect_one_launch(recorded: Recorded, text: str) -> None:
    """Raise Failure if the step took more than one launch."""
    if (count := launches(recorded)) > 1:
        raise mistakes.SEVERAL_LAUNCHES.failure(f"{text}: {count} launches")


def expect_read_once(recorded: Recorded, arguments: Sequence[str], text: str) -> None:
    """Raise Failure if a program loads an element of one of `arguments` twice."""
    for argument in arguments:
        for program, offsets in _loads(recorded, argument).items():
            most = int(np.unique(offsets, return_counts=True)[1].max(initial=0))
            if most > 1:
                example = f"{text}: program {program} loads elements of {argument} {most} times"
                raise mistakes.READS_TWICE.failure(example)


def expect_state_not_read(recorded: Recorded, text: str) -> None:
    """Raise Failure if a program loads from ACC, M or TOTAL."""
    for argument in STATE_POINTERS:
        if any(offsets.size for offsets in _loads(recorded, argument).values()):
            raise mistakes.FIRST_READS.failure(f"{text}: {argument} is loaded")


def expect_state_written(recorded: Recorded, state: Sequence[Any], text: str) -> None:
    """Raise Failure if an element of ACC, M or TOTAL was stored by no program."""
    for argument, part in zip(STATE_POINTERS, state, strict=True):
        stored = np.zeros(part.numel(), bool)
        for access in recorded.accesses:
            if access.kind == "store" and access.argument == argument:
                stored[np.asarray(access.offsets)] = True
        if not stored.all():
            where = ", ".join(map(str, np.argwhere(~stored.reshape(part.shape))[0]))
            message = "Some of ACC, M or TOTAL was never written: the next step needs the state of every row of every head."
            raise Failure(message, f"{text}: {argument}[{where}] and {(~stored).sum() - 1} more")


def expect_not_stored(
    recorded: Recorded, arguments: Sequence[str], mistake: Misconception, text: str
) -> None:
    """Raise `mistake` if a program stores anything to one of `arguments`, whatever the value."""
    for access in recorded.accesses:
        if access.kind == "store" and access.argument in arguments and access.offsets.size:
            raise mistake.failure(f"{text}: program {tuple(access.program)} stores to {access.argument}")


def expect_named_keys_only(recorded: Recorded, block: Step, text: str, mistake: Misconception) -> None:
    """Raise `mistake` if a program loads keys that none of its own segments names."""
    keys, D = block.k.shape[-2:]
    for argument, width in (("K", D), ("KS", 1), ("V", D), ("VS", 1)):
        for (program, head, _), offsets in _loads(recorded, argument).items():
            first, last = block.programs[program][2:]
            allowed = {key for segment in block.segments[first:last] for key in range(segment[0], segment[3])}
            read = set((offsets // width % keys).tolist())
            if extra := sorted(read - allowed):
                where = f"program ({program}, {head}) loads {argument} of key {extra[0]}"
                raise mistake.failure(f"{text}: {where} and {len(extra) - 1} more")


def _loads(recorded: Recorded, argument: str) -> dict[tuple[int, ...], np.ndarray]:
    """Return the offsets of a kernel argument that each program loads, with repeats."""
    found: dict[tuple[int, ...], list[np.ndarray]] = {}
    for access in recorded.accesses:
        if access.kind == "load" and access.argument == argument:
            found.setdefault(tuple(access.program), []).append(np.asarray(access.offsets))
    return {program: np.concatenate(parts) for program, parts in found.items()}
