"""Checks of 05.forward, the ring without a mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_array, expect_tuple, relative_error
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.faults import Ended, Faults
from ringlab_course.checking.numbers import NAMES, rounding_bound
from ringlab_course.checking.positions import (
    Shards,
    compare_ranks,
    expect_bytes,
    expect_neighbours,
    narrow,
    shards,
)
from ringlab_course.checking.ring_mistakes import FORWARD, truth

MISTAKES = {each.name: each for each in FORWARD}


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    for P, L, D in ((2, 1, 1), (2, 4, 4), (3, 1, 2), (3, 2, 2), (1, 2, 2)):
        case = shards(rng, [L] * P, 1, 1, D)
        compare_ranks(case, case.run(subject).results, FORWARD)


def _check_rounds(subject: Any, rng: np.random.Generator) -> None:
    for P in (1, 3, 8):  # with two ranks P and 2(P − 1) are the same, and everybody is a neighbour
        case = shards(rng, [2] * P, 1, 1, 2)
        expect_neighbours(case.run(subject).trace, case.text)


def _check_bytes(subject: Any, rng: np.random.Generator) -> None:
    for P, H, K in ((2, 1, 1), (3, 2, 1), (3, 4, 2)):
        case = shards(rng, [4] * P, H, K, 4)
        expect_bytes(case, case.run(subject).trace, H // K)
    case = narrow(shards(rng, [4] * 3, 1, 1, 4))
    expect_bytes(case, case.run(subject).trace)


def _check_eight_ranks(subject: Any, rng: np.random.Generator) -> None:
    for L, H, K in ((1, 1, 1), (3, 4, 2)):
        case = shards(rng, [L] * 8, H, K, 8)
        compare_ranks(case, case.run(subject).results, FORWARD)


def _check_sloped(subject: Any, rng: np.random.Generator) -> None:
    """Scores that grow along the sequence: the last block outweighs all others."""
    for P in (2, 8):
        case = shards(rng, [3] * P, 1, 1, 4, size=30.0, text=", large scores")
        for origin, k in enumerate(case.ks):
            k += 3.0 * origin
        results = case.run(subject).results
        for rank, result in enumerate(results):
            if not all(torch.isfinite(torch.as_tensor(part)).all() for part in expect_tuple(result, NAMES)):
                raise MISTAKES["overflowing_ring"].failure(f"{case.text}: rank {rank}")
        compare_ranks(case, results, FORWARD)


def _check_bfloat16(subject: Any, rng: np.random.Generator) -> None:
    """bfloat16 comes in, float32 is computed with."""
    case = narrow(shards(rng, [4] * 8, 1, 1, 16))
    outcome = case.run(subject)
    try:
        for result, q in zip(outcome.results, case.qs, strict=True):
            out, lse = expect_tuple(result, NAMES)
            expect_array(out, q.shape, name="out", dtype="float32")
            expect_array(lse, q.shape[:-1], name="lse", dtype="float32")
        compare_ranks(case, outcome.results, FORWARD)
    except Failure as failure:
        if failure.misconception is None:
            raise MISTAKES["low_precision_ring"].failure(failure.counterexample) from None
        raise


def _check_memory(subject: Any, rng: np.random.Generator) -> None:
    """A rank's peak is the same among 3 and among 8, but for one block: shards are equal, S is not.

    Among 2 no block that came is in use while another comes, so a rank needs one less. A block of 4 MiB stands out from what the judge, who reads whole pages from the system, sees besides; few
    tokens keep it quick for answers that loop over keys.
    """
    few, many = (shards(rng, [4] * P, 1, 1, 131072) for P in (3, 8))
    peaks = [max(report.peak_bytes for report in case.run(subject).memory) for case in (few, many)]
    if peaks[1] > peaks[0] + many.block_bytes(0):
        raise MISTAKES["keeps_every_block"].failure(
            f"4 tokens on every rank, a K/V block of {many.block_bytes(0):,} bytes: "
            f"peak {peaks[0]:,} bytes with P=3, {peaks[1]:,} with P=8"
        )


def _check_killed(subject: Any, rng: np.random.Generator) -> None:
    """The shard of a dead rank is lost: whoever still needs it can only break off."""
    for P, rank, exchange in ((2, 1, 0), (3, 0, 0), (3, 2, 1)):
        case = shards(rng, [2] * P, 1, 1, 2)
        results = case.run(subject, Faults(kill=(rank, exchange))).results
        example = f"{case.text}: rank {rank} dies before its exchange {exchange}"
        if results[rank] != Ended("Killed"):
            raise Failure("A rank makes fewer exchanges than there are blocks to fetch.", example)
        for other, answer in enumerate(results):
            if not isinstance(answer, Ended):
                _expect_whole(case, other, answer, f"{example}, and rank {other} returned as if it had not")


def _expect_whole(case: Shards, rank: int, answer: Any, example: str) -> None:
    right = truth(rank, case.qs, case.ks, case.vs)
    keys, values = torch.cat(case.ks, dim=-2), torch.cat(case.vs, dim=-2)
    if relative_error(expect_tuple(answer, NAMES), right) > rounding_bound(
        case.qs[rank], keys, values, right
    ):
        raise MISTAKES["goes_on_without_the_dead"].failure(example)


HINTS = (
    "How many blocks must your queries meet, and how many of them have to travel to you?",
    "Loop over P steps: attend to the block that is here with ring_step; then, unless it was the last step, "
    "put what ring.shift(k, v) returns in place of k and v. Begin with the identity (0, −inf).",
    r"$(o, L) \leftarrow (o, L) \oplus \mathrm{attend}(q, k_{(r-t) \bmod P}, v_{(r-t) \bmod P})$ for "
    r"$t = 0 \dots P-1$, with a shift after every $t < P-1$",
)

STAGE = Stage(
    id="05.forward",
    function="ring_forward",
    title="The forward ring",
    kind="ring",
    helpers=("ring_step",),
    hints=HINTS,
    misconceptions=FORWARD,
    checks=(
        Check("values", 3, "visible", "out and lse equal full attention for P = 1, 2, 3", _check_values),
        Check("rounds", 1, "visible", "P − 1 exchanges, all with the next rank", _check_rounds, kind="cost"),
        Check(
            "bytes",
            2,
            "visible",
            "exactly the bytes of K and V travel, in their dtype",
            _check_bytes,
            kind="cost",
        ),
        Check("eight_ranks", 2, "stress", "eight ranks, several heads", _check_eight_ranks),
        Check("sloped", 1, "stress", "large scores that grow along the sequence", _check_sloped),
        Check("bfloat16", 1, "stress", "bfloat16 inputs, float32 in the state", _check_bfloat16),
        Check(
            "memory",
            2,
            "held-out",
            "memory does not grow with the number of ranks",
            _check_memory,
            kind="cost",
        ),
        Check(
            "killed",
            1,
            "held-out",
            "a rank dies: no other returns numbers in which its keys are missing",
            _check_killed,
        ),
    ),
)
