"""Checks of 05.forward, the ring without a mask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_array, expect_tuple, is_close, is_finite
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_suspecting
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.faults import Ended, Faults
from ringlab_course.checking.growth import keeps_every_block
from ringlab_course.checking.numbers import NAMES
from ringlab_course.checking.positions import (
    Shards,
    answered_ranks,
    compare_ranks,
    compare_runs,
    expect_bytes,
    expect_neighbours,
    narrow,
    shards,
)
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of

mistake = mistakes_of("05.forward")


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    sizes = (
        (2, 1, 1, 1, 1),
        (2, 4, 1, 1, 4),
        (3, 1, 1, 1, 2),
        (3, 2, 1, 1, 2),
        (3, 2, 4, 2, 2),
        (1, 2, 1, 1, 2),
    )
    compare_runs(subject, (shards(rng, [L] * P, H, K, D) for P, L, H, K, D in sizes))


def _check_rounds(subject: Any, rng: np.random.Generator) -> None:
    for P in (1, 3, 8):  # P = 2 tells nothing: there 2(P − 1) = P, and the only other rank is a neighbour
        case = shards(rng, [2] * P, 1, 1, 2)
        outcome = case.run(subject)
        expect_neighbours(outcome.trace, case.text)
        compare_ranks(case, outcome.results)


def _check_bytes(subject: Any, rng: np.random.Generator) -> None:
    cases = [shards(rng, [4] * P, H, K, 4) for P, H, K in ((2, 1, 1), (3, 2, 1), (3, 4, 2))]
    for case in (*cases, narrow(shards(rng, [4] * 3, 1, 1, 4))):
        outcome = case.run(subject)
        try:
            expect_bytes(case, outcome.trace, case.qs[0].shape[1] // case.ks[0].shape[1])
        except Failure as failure:
            if _one_hop_too_many(case, outcome.trace):
                raise mistake("sends_p_times").failure(failure.counterexample) from None
            raise
        compare_ranks(case, outcome.results)


def _one_hop_too_many(case: Shards, trace: Any) -> bool:
    """Return whether every rank makes P hops, each with one K/V block. All blocks have the same size."""
    P = case.world_size
    return all(
        trace.rounds(rank) == P and trace.bytes_sent(rank) == P * case.block_bytes(0) for rank in range(P)
    )


def _check_eight_ranks(subject: Any, rng: np.random.Generator) -> None:
    compare_runs(subject, (shards(rng, [L] * 8, H, K, 8) for L, H, K in ((1, 1, 1), (3, 4, 2))))


def _check_sloped(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on scores that grow along the sequence, so that the last block outweighs all others."""
    _compare_finite(subject, [_sloped(rng, P) for P in (2, 8)])


def _sloped(rng: np.random.Generator, P: int) -> Shards:
    case = shards(rng, [3] * P, 1, 1, 4, size=30.0, text=", large scores")
    for origin, k in enumerate(case.ks):
        k += 3.0 * origin
    return case


def _compare_finite(subject: Any, cases: Iterable[Shards]) -> None:
    """Compare results with the oracle's. Raises: the mistake "overflowing_ring" for an infinity or a NaN."""
    for case in cases:
        results = case.run(subject).results
        for rank, result in enumerate(results):
            if not is_finite(*expect_tuple(result, NAMES)):
                raise mistake("overflowing_ring").failure(f"{case.text}: rank {rank}")
        compare_ranks(case, results)


def _check_bfloat16(subject: Any, rng: np.random.Generator) -> None:
    """Check that bfloat16 inputs are computed in float32."""
    for P in (2, 8):
        case = narrow(shards(rng, [4] * P, 1, 1, 16))
        results = case.run(subject).results
        for result, q in zip(results, case.qs, strict=True):
            _expect_wide(expect_tuple(result, NAMES), q, case.text)
        answers = list(answered_ranks(case, results))
        most = P * _rounding(answers)
        compare_suspecting(answers, mistake("low_precision_ring"), lambda error, most=most: error <= most)


def _expect_wide(parts: tuple[Any, ...], q: torch.Tensor, text: str) -> None:
    if any(getattr(part, "dtype", None) is torch.bfloat16 for part in parts):
        raise mistake("low_precision_ring").failure(f"{text}: out or lse is bfloat16")
    for part, shape, name in zip(parts, (q.shape, q.shape[:-1]), NAMES, strict=True):
        expect_array(part, shape, name=name, dtype="float32")


def _rounding(answers: Sequence[Answered]) -> float:
    """Return the largest relative error that can come from rounding out and lse to bfloat16 once.

    Such a rounding changes a number by at most 2⁻⁸ of its size.
    """
    return 2.0**-7 * max(1.0, *(float(np.abs(one.truth[1]).max()) for one in answers))


def _check_growth(subject: Any, rng: np.random.Generator) -> None:
    """Check memory as `_check_memory` does, but with blocks of 512 KiB, which is coarser and quicker."""
    _expect_constant(subject, rng, 16384, spare=2)


def _check_memory(subject: Any, rng: np.random.Generator) -> None:
    """Check that a rank's peak memory grows by at most one block from 3 to 10 ranks with equal shards.

    The comparison begins with 3 ranks. With 2 ranks, no received block is in use while another arrives, so a
    rank needs one block less. A block of 4 MiB is large compared with other memory in the judge's
    measurement, which counts whole pages. With few tokens, answers that loop over keys remain quick. The
    values of these runs are compared too, because a ring that returns zeros needs no memory.
    """
    _expect_constant(subject, rng, 131072, spare=1)


def _expect_constant(subject: Any, rng: np.random.Generator, D: int, spare: int) -> None:
    """Raise the Failure of a ring whose peak memory grows by more than `spare` blocks from 3 to 10 ranks."""
    few, many = (shards(rng, [4] * P, 1, 1, D) for P in (3, 10))
    runs = [case.run(subject) for case in (few, many)]
    peaks = [max(report.peak_bytes for report in run.memory) for run in runs]
    if keeps_every_block(peaks, 10, many.block_bytes(0), spare):
        raise mistake("keeps_every_block").failure(
            f"4 tokens on every rank, a K/V block of {many.block_bytes(0):,} bytes: "
            f"peak {peaks[0]:,} bytes with P=3, {peaks[1]:,} with P=10"
        )
    for case, run in zip((few, many), runs, strict=True):
        compare_ranks(case, run.results)


def _check_killed(subject: Any, rng: np.random.Generator) -> None:
    """Check that a rank breaks off if it still needs the shard of a dead rank.

    The shard is lost, so no right result is possible. If no rank dies, all results are right.
    """
    for P, rank, exchange in ((2, 1, 0), (3, 0, 0), (3, 2, 1)):
        compare_runs(subject, [shards(rng, [2] * P, 1, 1, 2)])
        case = shards(rng, [2] * P, 1, 1, 2)
        results = case.run(subject, Faults(kill=(rank, exchange))).results
        example = f"{case.text}: rank {rank} dies before its exchange {exchange}"
        if not isinstance(results[rank], Ended) or results[rank] != Ended("Killed"):
            raise Failure("A rank makes fewer exchanges than there are blocks to fetch.", example)
        for other, right in enumerate(answered_ranks(case, results)):
            if not isinstance(right.answer, Ended):
                _expect_whole(right, f"{example}, and rank {other} returned as if it had not")


def _expect_whole(one: Answered, example: str) -> None:
    if not is_close(expect_tuple(one.answer, NAMES), one.truth, one.bound):
        raise mistake("goes_on_without_the_dead").failure(example)


HINTS = (
    "How many blocks must your queries meet? How many of them have to travel to your rank?",
    "Begin with the identity (0, −inf) and loop over P steps. In each step, attend to the present block with ring_step; "
    "then, except in the last step, replace k and v by what ring.shift(k, v) returns.",
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
    misconceptions=misconceptions_of("05.forward"),
    checks=(
        Check(
            "values",
            3,
            "visible",
            "out and lse equal full attention for P = 1, 2, 3; grouped heads",
            _check_values,
        ),
        Check("rounds", 1, "visible", "P − 1 exchanges, all with the next rank", _check_rounds, kind="cost"),
        Check(
            "bytes",
            2,
            "visible",
            "exactly the bytes of K and V travel, in their dtype",
            _check_bytes,
            kind="cost",
        ),
        Check("bfloat16", 1, "visible", "bfloat16 inputs, float32 in the state", _check_bfloat16),
        Check("eight_ranks", 2, "stress", "eight ranks, several heads", _check_eight_ranks),
        Check("sloped", 1, "stress", "large scores that grow along the sequence", _check_sloped),
        Check(
            "growth",
            1,
            "visible",
            "memory does not grow with the number of ranks",
            _check_growth,
            kind="cost",
        ),
        Check(
            "memory",
            1,
            "held-out",
            "the same, with large blocks",
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
