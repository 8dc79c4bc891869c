"""Checks of 06.overlap: a ring that has its exchange under way while it computes.

What is looked at is the order of a rank's posts, computations and waits, on the virtual clock. Under the
judge posts and waits are facts, and that the rank computes between them is its own word (see
`ringlab_course.judge.network`); values, rounds, bytes and memory are facts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Crashed, Failure, NotWritten, broken_rule
from ringlab_course.checking.faults import Faults
from ringlab_course.checking.numbers import NAMES
from ringlab_course.checking.overlap import MISTAKES, OVERLAP, expect_overlap
from ringlab_course.checking.positions import (
    Shards,
    compare_ranks,
    expect_bytes,
    expect_neighbours,
    narrow,
    shards,
)
from ringlab_course.checking.ring_mistakes import FORWARD

SHARED = (
    "forgets_last_block", "forgets_own_block", "never_uses_the_visitor", "sends_own_block_again", "counts_to_three",
    "sends_p_times", "splits_the_exchange", "gathers_everything", "repeats_heads_on_the_wire", "sends_too_many_bytes",
    "keeps_every_block", "does_not_unpack", "leaves_the_ring", "never_waits",
)  # fmt: skip
"""Mistakes of any ring, told as in exercise 05."""


def _run(subject: Any, case: Shards, faults: Faults | None = None) -> Any:
    """Return the outcome of the learner's ring; a rule of exchange that it breaks gets its name."""
    try:
        return case.run(subject, faults)
    except Crashed as crash:
        name = broken_rule(crash)
        if name is None:
            raise
        raise MISTAKES[name].failure(f"{case.text}\n{crash.counterexample}") from None


def _verify(subject: Any, case: Shards, faults: Faults | None = None) -> Any:
    outcome = _run(subject, case, faults)
    for rank, result in enumerate(outcome.results):
        parts = expect_tuple(result, NAMES)
        if any(torch.isnan(torch.as_tensor(part)).any() for part in parts):
            raise MISTAKES["reads_before_waiting"].failure(f"{case.text}: rank {rank}")
    compare_ranks(case, outcome.results, FORWARD)
    return outcome


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    for P, L, D in ((1, 2, 2), (2, 1, 1), (2, 4, 4), (3, 1, 2), (3, 2, 2)):
        _verify(subject, shards(rng, [L] * P, 1, 1, D))
    _verify(subject, narrow(shards(rng, [4] * 3, 1, 1, 4)))
    _verify(subject, shards(rng, [3] * 8, 4, 2, 8))


def _check_order(subject: Any, rng: np.random.Generator) -> None:
    for P in (2, 3, 4):
        case = shards(rng, [2] * P, 1, 1, 2)
        expect_overlap(_run(subject, case).trace, case.text)


def _check_traffic(subject: Any, rng: np.random.Generator) -> None:
    for P, H, K in ((1, 1, 1), (3, 1, 1), (3, 4, 2)):
        case = shards(rng, [4] * P, H, K, 4)
        trace = _run(subject, case).trace
        _expect_direction(trace, case.text)
        expect_neighbours(trace, case.text)
        expect_bytes(case, trace, H // K)
    _check_as_they_came(subject, narrow(shards(rng, [4] * 3, 1, 1, 4)))


def _expect_direction(trace: Any, text: str) -> None:
    """Raise the Failure of a ring that goes the other way round."""
    P = trace.world_size
    if P > 2 and all(trace.peers(rank) == {(rank - 1) % P} for rank in range(P)):
        raise MISTAKES["wrong_direction"].failure(f"{text}: rank 0 sends to rank {P - 1}, should send to 1")


def _check_as_they_came(subject: Any, case: Shards) -> None:
    """bfloat16 travels as bfloat16."""
    outcome = _verify(subject, case)
    sent, exact = outcome.trace.bytes_sent(0), 2 * case.block_bytes(0)
    if sent == 2 * exact:
        example = f"{case.text}: rank 0 sent {sent:,} bytes, K and V take {exact:,}"
        raise MISTAKES["widens_before_sending"].failure(example)
    expect_bytes(case, outcome.trace)


def _check_eight_ranks(subject: Any, rng: np.random.Generator) -> None:
    case = shards(rng, [3] * 8, 4, 2, 8)
    outcome = _verify(subject, case)
    expect_overlap(outcome.trace, case.text)


def _check_any_network(subject: Any, rng: np.random.Generator) -> None:
    """Late posts, slow links and a slow rank change no answer: only times."""
    case = shards(rng, [2] * 3, 1, 1, 2)
    _verify(subject, case)
    seed = int(rng.integers(1 << 30))
    for name, faults, text in (
        ("writes_what_is_sent", Faults(seed, late=1.0), "every exchange posted as late as a transport may"),
        ("looks_at_the_clock", Faults(seed, delay=8.0), "links of different speed"),
        ("looks_at_the_clock", Faults(seed, slow=(1, 8.0)), "one rank eight times as slow"),
    ):
        try:
            _verify(subject, case, faults)
        except NotWritten:
            raise
        except Failure as failure:
            raise MISTAKES[name].failure(f"{text}\n{failure.counterexample}") from None


def _check_memory(subject: Any, rng: np.random.Generator) -> None:
    """A rank's peak is the same among 3 and among 6, but for one block; 4 MiB stand out from whole pages.

    Not among 2: there nothing is received into a buffer that a block has left.
    """
    few, many = (shards(rng, [4] * P, 1, 1, 131072) for P in (3, 6))
    peaks = [max(report.peak_bytes for report in _run(subject, case).memory) for case in (few, many)]
    if peaks[1] > peaks[0] + many.block_bytes(0):
        raise MISTAKES["keeps_every_block"].failure(
            f"4 tokens on every rank, a K/V block of {many.block_bytes(0):,} bytes: "
            f"peak {peaks[0]:,} bytes with P=3, {peaks[1]:,} with P=6"
        )


HINTS = (
    "While you compute with a block, what does its sending do to it? And where does the next block go meanwhile?",
    "In every step but the last: work = ring.post(k, v), then the computation with k and v through ring.compute, then "
    "k, v = work.wait(). The last block is only computed with.",
    r"per step $\max(t_\mathrm{compute}, t_\mathrm{hop})$ instead of $t_\mathrm{compute} + t_\mathrm{hop}$, for "
    r"$t = 0 \dots P-2$, then $t_\mathrm{compute}$",
)

STAGE = Stage(
    id="06.overlap",
    function="overlapped_ring",
    title="The double-buffered ring",
    kind="ring",
    helpers=("attend",),
    hints=HINTS,
    misconceptions=(*OVERLAP, *(MISTAKES[name] for name in SHARED)),
    checks=(
        Check(
            "values", 2, "visible", "out and lse equal full attention for P = 1, 2, 3 and 8", _check_values
        ),
        Check(
            "order",
            3,
            "visible",
            "post, compute, wait: no hop is exposed on the virtual clock",
            _check_order,
            kind="speed",
        ),
        Check(
            "traffic",
            2,
            "visible",
            "P − 1 exchanges with the next rank, exactly the bytes of K and V, in their dtype",
            _check_traffic,
            kind="cost",
        ),
        Check(
            "eight_ranks",
            2,
            "stress",
            "eight ranks, several heads, every hop hidden",
            _check_eight_ranks,
            kind="speed",
        ),
        Check(
            "any_network",
            1,
            "stress",
            "the same answers where links, ranks or posts are slow",
            _check_any_network,
        ),
        Check(
            "memory", 1, "held-out", "two blocks, whatever the number of ranks", _check_memory, kind="cost"
        ),
    ),
)
