"""Checks of 17.forward: a ring inside shard_map on any layout, and the messages of the compiled program."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from ringlab.layout import contiguous, zigzag
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e17_ring_in_jax.cases import (
    NOT_RUN,
    TRACED,
    Case,
    Parts,
    case,
    expect_told,
    expect_values,
    look,
    narrow_case,
    shuffled,
    verify,
    verify_narrow,
    walk,
)
from ringlab_course.mesh.examine import Examined

mistake = mistakes_of("17.forward")

L = 4


def _ring(**how: Any) -> Callable[[Case], Parts]:
    return lambda given: walk(given, **how)


def _averaged(of: Callable[[list[np.ndarray]], np.ndarray]) -> Callable[[Case], Parts]:
    """Return a wrong ring: its lse is right, but its out is `of` a list of the outs of single blocks."""

    def imitate(given: Case) -> Parts:
        alone = [walk(given, steps=lambda given, step=step: (step,))[0] for step in range(given.ranks)]
        return of(alone), walk(given)[1]

    return imitate


def _half_and_half(outs: list[np.ndarray]) -> np.ndarray:
    """Return the result of averaging the old and the new out with equal weights in every step."""
    return reduce(lambda one, other: (one + other) / 2, outs)


def _as_contiguous(given: Case, rank: int, origin: int) -> np.ndarray:
    own = np.arange(given.length)
    return (rank * given.length + own)[:, None] >= origin * given.length + own


def _before(given: Case, rank: int, origin: int) -> np.ndarray:
    return given.positions[rank][:, None] > given.positions[origin]


MISTAKES = (
    mistake("open_ring", _ring(here=lambda rank, step, P: rank - step if rank >= step else None)),
    mistake("other_way", _ring(here=lambda rank, step, P: (rank + step) % P)),
    mistake("own_block_again", _ring(here=lambda rank, step, P: (rank - min(step, 1)) % P)),
    mistake("mask_of_the_step_before", _ring(believed=lambda rank, step, P: (rank - max(step - 1, 0)) % P)),
    mistake("local_mask", _ring(mask=lambda given, rank, origin: np.tril(np.ones((given.length, given.length), bool)))),
    mistake("assumes_contiguous", _ring(mask=_as_contiguous)),
    mistake("forgets_its_own", _ring(steps=lambda given: range(1, given.ranks))),
    mistake("last_block_missing", _ring(steps=lambda given: range(max(1, given.ranks - 1)))),
    mistake("averages_blocks", _averaged(_half_and_half)),
    mistake("strictly_before", _ring(mask=_before)),
    mistake("not_causal", _ring(mask=lambda given, rank, origin: np.ones((given.length, given.length), bool))),
    mistake("hops_of_the_last_block"),
    mistake("gathers"),
    mistake("widens_before_sending"),
    mistake("rounds_on_the_way"),
    mistake("overflows"),
    TRACED["asks_by_if"],
    TRACED["numpy_by_tracer"],
    NOT_RUN["branch"],
    NOT_RUN["turns"],
)  # fmt: skip
NAMED = {each.name: each for each in MISTAKES}
IMITATED = (
    *MISTAKES,
    mistake("averages_blocks", _averaged(lambda outs: np.mean(outs, axis=0))),
)
"""All mistakes with imitations. A mistake that can be made in two ways is listed twice."""


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    verify(subject, [case(rng, contiguous(L * P, P)) for P in (1, 3)], IMITATED)


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    verify(subject, [case(rng, zigzag(L * 4, 4))], IMITATED)


def _count(subject: Any, given: Case) -> Examined:
    """Return the outcome of the program. Raises: Failure if it sends more than K and V, P − 1 times each."""
    found = look(subject, given, NAMED)
    P, enough = given.ranks, 2 * (given.ranks - 1)
    example = (
        f"{given.text}: {found.messages} messages of a device, {found.blocks:g} blocks; {enough} are enough"
    )
    if found.others:
        raise NAMED["gathers"].failure(f"{given.text}: {', '.join(found.others)} in the compiled program")
    if found.blocks == 2 * P:
        raise NAMED["hops_of_the_last_block"].failure(example)
    if found.blocks > enough:
        raise Failure(
            "The compiled program sends more than K and V, P − 1 times each. What else do you send, or how often?",
            example,
        )
    if found.messages > enough:
        raise Failure(
            "The bytes are right, but they travel in more messages than necessary, and each message costs a latency.",
            example,
        )
    if not found.blocks:
        raise Failure("Nothing is sent. How does a device get the blocks of the others?", example)
    expect_values(found, given)
    return found


def _check_messages(subject: Any, rng: np.random.Generator) -> None:
    """Count messages on the layouts of two other checks, so that nothing is compiled just for this check."""
    for deal in (zigzag(L * 4, 4), contiguous(L * 3, 3)):
        _count(subject, case(rng, deal))


def _check_wire(subject: Any, rng: np.random.Generator) -> None:
    given = narrow_case(rng, 8)
    found = _count(subject, given)
    told = f"{given.text}: {', '.join(sorted(found.types)) or 'nothing'} on the wire"
    if {"float32", "float64"} & set(found.types):
        raise NAMED["widens_before_sending"].failure(told)
    expect_told(found, given)
    if "bfloat16" not in found.types:
        raise Failure("K and V do not travel in bfloat16, the type in which they came.", told)


def _check_bfloat16(subject: Any, rng: np.random.Generator) -> None:
    verify_narrow(subject, narrow_case(rng, 8), NAMED)


def _check_any(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on eight devices with positions dealt at random and scores of some hundreds.

    The program must be a ring, which may make one hop too many.
    """
    given = case(rng, shuffled(rng, 8, L), "dealt at random, large scores", size=8.0)
    found = look(subject, given, NAMED)
    if any(np.isnan(part).any() for part in found.results):
        raise NAMED["overflows"].failure(given.text)
    verify(subject, [given], IMITATED)
    if found.others:
        raise NAMED["gathers"].failure(f"{given.text}: {', '.join(found.others)} in the compiled program")
    if found.blocks > 2 * given.ranks:
        raise Failure(
            "The values are right, but the program is not a ring: a device sends more than P blocks of K and of V.",
            f"{given.text}: {found.blocks:g} blocks of a device",
        )


STAGE = Stage(
    id="17.forward",
    function="ring_forward",
    title="The ring in shard_map",
    kind="mesh",
    hints=(
        "Which block can a device attend to before anything is sent? How many blocks are left then? What comes first in each turn, the hop or the attention?",
        "rank = lax.axis_index(\"ring\"), and jnp.asarray(positions)[rank] are your queries' positions. Begin with attend on your own block. Then use lax.scan over "
        "jnp.arange(1, P): lax.ppermute k and v with the pairs (r, (r + 1) % P), make the mask from the positions of (rank − step) % P, attend, merge.",
        r"after $s$ hops: the block of $(r - s) \bmod P$; $\;\mathrm{mask}_{ij} = \mathrm{pos}_r[i] \ge \mathrm{pos}_{(r-s) \bmod P}[j]$; $\;2(P-1)$ messages",
    ),
    misconceptions=MISTAKES,
    checks=(
        Check("values", 2, "visible", "out and lse of a contiguous layout, P = 1 and 3", _check_values),
        Check("layouts", 2, "visible", "zig-zag, P = 4", _check_layouts),
        Check("messages", 1, "visible", "2(P − 1) messages in the compiled program", _check_messages, kind="cost"),
        Check("bfloat16", 1, "visible", "inputs in bfloat16: out and lse as exact as float32", _check_bfloat16),
        Check("wire", 1, "visible", "bfloat16 on the wire, 2(P − 1) messages on 8 devices", _check_wire, kind="cost"),
        Check("any", 1, "held-out", "8 devices, any layout, large scores", _check_any),
    ),
)  # fmt: skip
