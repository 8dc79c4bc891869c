"""Checks of 17.couriers: a backward ring with custom_vjp, its messages' dtypes, and its memory per device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringlab.layout import zigzag
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e17_ring_in_jax.cases import (
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
)

mistake = mistakes_of("17.couriers")

L = 4
MORE = 1.25
"""The allowed ratio of scratch memory on 8 devices to that on 4. Couriers need the same memory on both.

A program that keeps blocks needs at least half as much again.
"""
MORE_BLOCKS = 0.5
"""The allowed growth of scratch memory for each further device, in blocks of K.

A program that keeps blocks needs at least 1 more.
"""
Home = Callable[[int, int, int], int | None]


def _gradients(given: Case, dlse: np.ndarray) -> Parts:
    """Return all five results for this cotangent of lse, in the order of devices."""
    return tuple(map(given.dealt, (*given.true[:2], *given.gradients(dlse))))


def _sent_home(home: Home) -> Callable[[Case], Parts]:
    """Return a wrong backward.

    The terms that device `rank` adds in a step end on device home(rank, step, P), or are lost if that is
    None.
    """

    def imitate(given: Case) -> Parts:
        P = given.ranks
        out, lse, dq, _, _ = map(given.dealt, given.true)
        total = np.zeros((2, *given.given()[1].shape))
        blocks = [slice(rank * given.length, (rank + 1) * given.length) for rank in range(P)]
        terms = _terms(given)
        for rank in range(P):
            for step in range(P):
                to, origin = home(rank, step, P), (rank - step) % P
                if to is not None:
                    total[:, :, :, blocks[to]] += terms(blocks[rank], blocks[origin])
        return out, lse, dq, total[0], total[1]

    return imitate


def _terms(given: Case) -> Callable[[slice, slice], np.ndarray]:
    """Return a function of slices of queries and keys that returns what these queries add to dk and dv."""
    q, k, v, dout, dlse = (x.astype(np.float64) for x in (*given.given(), *given.cotangents()))
    scale, order = q.shape[-1] ** -0.5, given.positions.ravel()
    out, lse = (given.dealt(x) for x in given.true[:2])
    delta = (dout * out).sum(-1) - dlse
    seen = order[:, None] >= order
    with np.errstate(over="ignore"):
        weights = np.where(seen, np.exp(scale * q @ k.swapaxes(-1, -2) - lse[..., None]), 0.0)
    dscores = weights * (dout @ v.swapaxes(-1, -2) - delta[..., None])

    def of(queries: slice, keys: slice) -> np.ndarray:
        p, ds = (x[:, :, queries, keys].swapaxes(-1, -2) for x in (weights, dscores))
        return np.stack([scale * ds @ q[:, :, queries], p @ dout[:, :, queries]])

    return of


MISTAKES = (
    mistake("lse_is_a_result_too", lambda given: _gradients(given, np.zeros(given.dlse.shape))),
    mistake("lse_with_the_wrong_sign", lambda given: _gradients(given, -given.dlse.double().numpy())),
    mistake("against_the_blocks", _sent_home(lambda rank, step, P: (rank + step) % P)),
    mistake("a_hop_before_home", _sent_home(lambda rank, step, P: (rank - step - 1) % P)),
    mistake("stays_where_it_was_computed", _sent_home(lambda rank, step, P: rank)),
    mistake("own_pair_only", _sent_home(lambda rank, step, P: rank if step == 0 else None)),
    mistake("own_pair_forgotten", _sent_home(lambda rank, step, P: (rank - step) % P if step else None)),
    mistake("all_four_home"),
    mistake("keeps_what_came_by"),
    mistake("keeps_the_blocks"),
    mistake("writes_out_the_turns"),
    mistake("rounds_on_the_way"),
    mistake("narrow_couriers"),
    mistake("wide_blocks"),
)  # fmt: skip
NAMED = {each.name: each for each in MISTAKES}
IMITATED = (
    *MISTAKES,
    mistake("against_the_blocks", _sent_home(lambda rank, step, P: (rank + step + 2) % P)),
    mistake("stays_where_it_was_computed", _sent_home(lambda rank, step, P: (rank + 1) % P)),
)
"""All mistakes with imitations. A mistake that can be made in two ways is listed twice."""


def _verify(subject: Any, *cases: Case) -> None:
    verify(subject, cases, IMITATED, gradients=True)


def _check_gradients(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, case(rng, zigzag(L * 4, 4)))


def _check_ring(subject: Any, rng: np.random.Generator) -> None:
    given = case(rng, zigzag(L * 4, 4))
    found, P = look(subject, given, NAMED, gradients=True), given.ranks
    enough = 2 * (P - 1) + 2 * (P - 1) + 2 * P
    example = (
        f"{given.text}, forward and backward: {found.messages} messages of a device, {found.blocks:g} blocks; "
        f"{enough} are enough"
    )
    if found.others:
        raise Failure("The compiled step has a collective that brings all blocks to all devices.", example)
    if found.blocks == enough + 2:
        raise NAMED["all_four_home"].failure(example)
    if found.blocks > enough:
        raise Failure(
            "The compiled step sends more blocks than it needs. K and V go P − 1 times forward and P − 1 times backward, couriers P times.",
            example,
        )
    expect_values(found, given, gradients=True)


def _check_held(subject: Any, rng: np.random.Generator) -> None:
    """Check the memory of a device on 4 and on 8 devices, with the same tokens on each device."""
    cases = [case(rng, zigzag(L * P, P)) for P in (4, 8)]
    few, many = (look(subject, given, NAMED, gradients=True) for given in cases)
    block = cases[0].given()[1].nbytes / 4
    if 0 < many.scratch <= min(MORE * few.scratch, few.scratch + 4 * MORE_BLOCKS * block):
        for given, found in zip(cases, (few, many), strict=True):
            expect_values(found, given, gradients=True)
        return
    example = (
        f"{L} tokens on each device: {few.scratch:,} bytes of scratch with P=4, {many.scratch:,} with P=8"
    )
    hops = many.blocks / 2  # of K and V; a ring makes 7 hops forward, 7 backward, and 8 with couriers
    name = "keeps_what_came_by" if hops <= 14 else "keeps_the_blocks" if hops < 22 else "writes_out_the_turns"
    raise NAMED[name].failure(f"{example}, {many.blocks:g} blocks sent")


def _check_wire(subject: Any, rng: np.random.Generator) -> None:
    """Check the types of messages.

    A program that sends each term directly to its owner sends couriers P − 1 times. No right program sends
    fewer, because P − 1 other devices wait for their terms.
    """
    given = narrow_case(rng, 8)
    found = look(subject, given, NAMED, gradients=True)
    expect_told(found, given)
    P, types = given.ranks, found.types
    narrow, wide = types.get("bfloat16", 0.0), types.get("float32", 0.0)
    blocks, couriers, fewest = 4 * (P - 1), 2 * P, 2 * (P - 1)
    example = f"{given.text}: {narrow:g} blocks of a device travel in bfloat16, {wide:g} in float32; K and V are {blocks}, dK and dV {couriers}"
    if wide < fewest or (wide < couriers and narrow > blocks):
        raise NAMED["narrow_couriers"].failure(example)
    if narrow == 0 or (wide > couriers and narrow < blocks):
        raise NAMED["wide_blocks"].failure(example)
    expect_values(found, given, gradients=True)


def _check_bfloat16(subject: Any, rng: np.random.Generator) -> None:
    verify_narrow(subject, narrow_case(rng, 8), NAMED, gradients=True)


def _check_any(subject: Any, rng: np.random.Generator) -> None:
    """Check results on three devices with positions dealt at random."""
    _verify(subject, case(rng, shuffled(rng, 3, L), "dealt at random"))


STAGE = Stage(
    id="17.couriers",
    function="courier_ring",
    title="Couriers by custom_vjp",
    kind="mesh",
    helpers=("ring_forward",),
    hints=(
        "Which of its own arrays does a device need to recompute p for any block that comes by? And what must the sum of a block's gradient travel with?",
        "keep returns ((out, lse), (q, k, v, out, lse)). Begin the backward with attend_backward on the own pair. Then use lax.scan: shift k, v, dk and dv together, add the "
        "terms. After the loop, shift dk and dv once more. delta also contains dlse. Round to q's dtype at the very end.",
        r"$\delta = \sum_d dO \cdot O - d\mathrm{lse}$, $\;2(P-1) + 2(P-1) + 2P$ messages",
    ),
    misconceptions=MISTAKES,
    checks=(
        Check("gradients", 3, "visible", "out, lse, dq, dk and dv, with a cotangent of lse", _check_gradients),
        Check("ring", 2, "visible", "messages of the compiled step", _check_ring, kind="cost"),
        Check("held", 2, "visible", "the memory that a device needs does not grow with P", _check_held, kind="cost"),
        Check("bfloat16", 1, "visible", "bfloat16 inputs: gradients rounded once", _check_bfloat16),
        Check("wire", 1, "visible", "bfloat16 inputs: couriers in float32, K and V as they are", _check_wire, kind="cost"),
        Check("any", 1, "held-out", "3 devices, any layout", _check_any),
    ),
)  # fmt: skip
