"""Exercise 00: does everything work here, and do you read the axes as ringlab writes them?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from ringlab_course.checking.answers import compare_with, expect_array
from ringlab_course.checking.contract import Check, Exercise, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.subject import Subject
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of

mistake = mistakes_of("00")

SPLIT_SIZES = ((1, 3, 2, 2), (2, 2, 3, 2), (2, 5, 3, 4))
"""Pairs of sizes (B, S, H, D), the smallest first.

S and H differ, so that exchanged axes show in the shape.
"""


# --- 00.environment ---------------------------------------------------------------------------------


def _report(subject: Subject) -> dict[str, Any]:
    answer = subject.call()
    if not isinstance(answer, dict):
        raise mistake("no_dict").failure(f"got {type(answer).__name__}")
    if missing := sorted({"python", "torch"} - set(answer)):
        raise Failure("A key is missing in the dict.", f"missing: {', '.join(missing)}")
    return answer


def check_python(subject: Subject, rng: np.random.Generator) -> None:
    """Check that `python` is the (major, minor) of the interpreter that runs here."""
    got, expected = _report(subject)["python"], tuple(sys.version_info[:2])
    if isinstance(got, (str, float)):
        raise mistake("version_as_text").failure(f"python: {got!r}")
    if not isinstance(got, (tuple, list)):
        raise Failure("`python` should be a pair of integers.", f"got {type(got).__name__}")
    if len(got) > 2 and tuple(got[:2]) == expected:
        raise mistake("whole_version").failure(f"python: {tuple(got)!r}")
    if tuple(got) != expected:
        raise Failure(
            "`python` is not the version that runs here.", f"got {tuple(got)!r}, expected {expected!r}"
        )


def check_torch(subject: Subject, rng: np.random.Generator) -> None:
    """Check the version of torch. A local part such as +cpu may be present or missing."""
    got, expected = str(_report(subject)["torch"]).partition("+")[0], version("torch").partition("+")[0]
    if got in {version(name).partition("+")[0] for name in ("numpy", "ringlab")}:
        raise mistake("another_package").failure(f"torch: {got!r}")
    if got != expected:
        raise Failure(
            "`torch` is not the version that is installed here.", f"got {got!r}, expected {expected!r}"
        )


# --- 00.axes ----------------------------------------------------------------------------------------


def split_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """Return x of shape (B, S, H·D) as (B, H, S, D), the right answer of this stage."""
    B, S, width = x.shape
    return x.reshape(B, S, heads, width // heads).transpose(0, 2, 1, 3)


def _check_split(subject: Subject, rng: np.random.Generator, sizes: Sequence[tuple[int, ...]]) -> None:
    for B, S, H, D in sizes:
        x = rng.normal(size=(B, S, H * D))
        answer = subject.call(x, H)
        if S != H and getattr(answer, "shape", None) == (B, S, H, D):
            raise mistake("tokens_first").failure(
                f"x {x.shape}, heads={H}: shape {(B, S, H, D)}, should be {(B, H, S, D)}"
            )
        compare_with(answer, split_heads(x, H), bound=1e-12, case=f"x {x.shape} = (B, S, H·D), heads={H}")


def check_shape(subject: Subject, rng: np.random.Generator) -> None:
    """Check shapes and values for one sequence and for two."""
    _check_split(subject, rng, SPLIT_SIZES[:2])


def check_batch(subject: Subject, rng: np.random.Generator) -> None:
    """Check that the batch axis stays in place for other sizes."""
    _check_split(
        subject, rng, [SPLIT_SIZES[2], (3, 4, 1, 5), tuple(int(n) for n in rng.integers(2, 7, size=4))]
    )


# --- 00.ring ----------------------------------------------------------------------------------------


def ring_sum(xs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum over ranks, stacked once for each rank: the right answer of this stage."""
    return np.stack([np.sum(xs, axis=0)] * len(xs))


def _run_sum(subject: Subject, xs: Sequence[np.ndarray]) -> Any:
    import torch

    return subject.run_ring(len(xs), [torch.from_numpy(x.copy()) for x in xs])


def _check_sum(subject: Subject, rng: np.random.Generator, world_sizes: Sequence[int]) -> None:
    drawn = [_values(rng, P) for P in world_sizes]
    compare_all(_summed(_run_sum(subject, xs), xs) for xs in drawn)


def _values(rng: np.random.Generator, P: int) -> list[np.ndarray]:
    return [np.round(rng.normal(size=(1, 2)), 2) for _ in range(P)]


def _summed(outcome: Any, xs: Sequence[np.ndarray]) -> Answered:
    parts = [expect_array(r, (1, 2), name=f"rank {rank}") for rank, r in enumerate(outcome.results)]
    values = ", ".join(f"rank {rank}: {x.ravel()[0]:g} …" for rank, x in enumerate(xs))
    case = f"P={len(xs)}; the values are {values} (below, the first index is the rank)"
    return Answered(np.stack(parts), ring_sum(xs), 1e-12, names=("the sum",), text=case)


def check_sum(subject: Subject, rng: np.random.Generator) -> None:
    """Check that all ranks return the sum over ranks."""
    _check_sum(subject, rng, (3, 4))


def check_any_world(subject: Subject, rng: np.random.Generator) -> None:
    """Check the sum on one, two and eight ranks."""
    _check_sum(subject, rng, (1, 2, 8))


def check_shifts(subject: Subject, rng: np.random.Generator) -> None:
    """Check that the ring makes P − 1 shifts, not more."""
    for P in (3, 5):
        xs = _values(rng, P)
        outcome = _run_sum(subject, xs)
        try:
            compare_all([_summed(outcome, xs)])
        except Failure as failure:
            raise Failure(
                "The number of shifts is checked only when the sum is right.", failure.counterexample
            ) from None
        rounds = outcome.trace.rounds(0)
        if rounds == P:
            raise mistake("one_shift_too_many").failure(f"P={P}: {rounds} shifts, {P - 1} are enough")
        if rounds != P - 1:
            raise Failure("The number of shifts is not P − 1.", f"P={P}: {rounds} shifts, should be {P - 1}")


EXERCISE = Exercise(
    id="00",
    slug="00_start_here",
    title="Start here: run, check, submit",
    stages=(
        Stage(
            id="00.environment",
            function="environment",
            title="Which Python and which torch run here",
            checks=(
                Check("python", 1, "visible", "the version of Python, as a pair", check_python),
                Check("torch", 1, "visible", "the version of torch", check_torch),
            ),
            hints=(
                "Which module describes the running interpreter, and which attribute of torch holds its version?",
                "`sys.version_info` is a tuple with five entries. You need the first two.",
                '`{"python": (sys.version_info.major, …), "torch": …}`',
            ),
            misconceptions=misconceptions_of("00.environment"),
        ),
        Stage(
            id="00.axes",
            function="split_heads",
            title="From (B, S, H·D) to (B, H, S, D)",
            checks=(
                Check("shape", 2, "visible", "one sequence and two: shape and values", check_shape),
                Check("batch", 2, "held-out", "other numbers of sequences, tokens and heads", check_batch),
            ),
            hints=(
                "In memory, which number comes after x[b, s, i]: the next feature of this token, or the next token?",
                "Split the last axis into two axes first; then exchange two axes. A reshape alone cannot exchange axes.",
                "$y_{b,h,s,d} = x_{b,\\,s,\\,hD+d}$",
            ),
            misconceptions=misconceptions_of("00.axes"),
        ),
        Stage(
            id="00.ring",
            function="ring_sum",
            title="A sum around the ring",
            kind="ring",
            checks=(
                Check("sum", 2, "visible", "every rank has the sum over all ranks", check_sum),
                Check("shifts", 1, "visible", "P − 1 shifts", check_shifts, kind="cost"),
                Check("any-world", 1, "stress", "one, two and eight ranks", check_any_world),
            ),
            hints=(
                "After one shift you hold your previous neighbour's value. What do you hold after two?",
                "Keep two variables: one travels, one grows. Only the one that travels goes into ring.shift.",
                "$\\text{total}_r = \\sum_{t=0}^{P-1} x_{(r-t) \\bmod P}$",
            ),
            misconceptions=misconceptions_of("00.ring"),
        ),
    ),
)  # fmt: skip
