"""Exercise 12: what the kernels read and wrote, as their interpreter wrote it down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.failures import Failure
from ringlab_course.exercises.e12_triton_ring_step import mistakes
from ringlab_course.exercises.e12_triton_ring_step.emulate import Step

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Recorded

ORIGIN = (0, 0, 0)
STATE = ("ACC", "M", "TOTAL")


def launches(recorded: Recorded) -> int:
    """Return how often program (0, 0, 0) began: programs run one after the other."""
    programs = [tuple(access.program) for access in recorded.accesses]
    before = [None, *programs[:-1]]
    return sum(now == ORIGIN and was != ORIGIN for was, now in zip(before, programs, strict=True))


def expect_one_launch(recorded: Recorded, text: str) -> None:
    """Raise a Failure where the step took more than one launch."""
    if (count := launches(recorded)) > 1:
        raise mistakes.SEVERAL_LAUNCHES.failure(f"{text}: {count} launches")


def expect_read_once(recorded: Recorded, arguments: Sequence[str], text: str) -> None:
    """Raise a Failure where a program loads an element of one of `arguments` twice."""
    for argument in arguments:
        for program, offsets in _loads(recorded, argument).items():
            most = int(np.unique(offsets, return_counts=True)[1].max(initial=0))
            if most > 1:
                example = f"{text}: program {program} loads elements of {argument} {most} times"
                raise mistakes.READS_TWICE.failure(example)


def expect_state_not_read(recorded: Recorded, text: str) -> None:
    """Raise a Failure where a program loads from ACC, M or TOTAL."""
    for argument in STATE:
        if any(offsets.size for offsets in _loads(recorded, argument).values()):
            raise mistakes.FIRST_READS.failure(f"{text}: {argument} is loaded")


def expect_state_written(recorded: Recorded, state: Sequence[Any], text: str) -> None:
    """Raise a Failure where no program stored an element of ACC, M or TOTAL."""
    for argument, part in zip(STATE, state, strict=True):
        stored = np.zeros(part.numel(), bool)
        for access in recorded.accesses:
            if access.kind == "store" and access.argument == argument:
                stored[np.asarray(access.offsets)] = True
        if not stored.all():
            where = ", ".join(map(str, np.argwhere(~stored.reshape(part.shape))[0]))
            message = "Some of ACC, M or TOTAL was never written: the next step needs the state of every row of every head."
            raise Failure(message, f"{text}: {argument}[{where}] and {(~stored).sum() - 1} more")


def expect_named_keys_only(recorded: Recorded, block: Step, text: str, mistake: Misconception) -> None:
    """Raise a Failure, as `mistake`, where a program loads keys that none of its own segments names."""
    keys, D = block.k.shape[-2:]
    for argument in ("K", "V"):
        for (program, head, _), offsets in _loads(recorded, argument).items():
            first, last = block.programs[program][2:]
            allowed = {key for begin, _, end, _ in block.segments[first:last] for key in range(begin, end)}
            read = set((offsets // D % keys).tolist())
            if extra := sorted(read - allowed):
                where = f"program ({program}, {head}) loads {argument} of key {extra[0]}"
                raise mistake.failure(f"{text}: {where} and {len(extra) - 1} more")


def _loads(recorded: Recorded, argument: str) -> dict[tuple[int, ...], np.ndarray]:
    """Return the offsets that each program loads of a kernel argument, repeats included."""
    found: dict[tuple[int, ...], list[np.ndarray]] = {}
    for access in recorded.accesses:
        if access.kind == "load" and access.argument == argument:
            found.setdefault(tuple(access.program), []).append(np.asarray(access.offsets))
    return {program: np.concatenate(parts) for program, parts in found.items()}
