"""Checks of 06.overlap: a ring that has its exchange under way while it computes.

What is looked at is the order of a rank's posts, computations and waits, on the virtual clock. Under the
judge posts and waits are facts, and that the rank computes between them is its own word (see
`ringlab.course.judge.network`); values, rounds, bytes and memory are facts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ringlab.course.answers import expect_tuple
from ringlab.course.contract import Check, Crashed, Failure, Misconception, NotWritten, Stage
from ringlab.course.contracts.e05_ring import (
    Shards,
    compare_ranks,
    expect_bytes,
    expect_neighbours,
    narrow,
    shards,
)
from ringlab.course.contracts.e05_ring_mistakes import FORWARD
from ringlab.course.contracts.e05_step import NAMES
from ringlab.course.faults import Faults

SHARED = (
    "forgets_last_block", "forgets_own_block", "never_uses_the_visitor", "sends_own_block_again", "counts_to_three",
    "sends_p_times", "splits_the_exchange", "gathers_everything", "repeats_heads_on_the_wire", "sends_too_many_bytes",
    "keeps_every_block", "does_not_unpack", "leaves_the_ring", "never_waits",
)  # fmt: skip
"""Mistakes of any ring, told as in exercise 05."""

OVERLAP = (
    Misconception(
        "posts_after_computing",
        "The exchange is posted when the block has been computed, and nothing is left to hide it behind: every hop is "
        "exposed. Post first. The block that leaves is only read, so you can compute with it while it travels.",
    ),
    Misconception(
        "waits_before_computing",
        "The exchange is posted early, but waited for at once: you hold the next block before you compute with this one, and "
        "every hop is exposed. Compute between post and wait.",
    ),
    Misconception(
        "overlaps_some_steps",
        "Some hops are hidden, others are not. Every step but the last has the same order: post, compute, wait.",
    ),
    Misconception(
        "computes_unseen",
        "No computation is seen: attend to a block through ring.compute(label, attend, q, k, v). It calls your function, and "
        "says when it begins and ends; that is what a clock, a trace and this check go by.",
    ),
    Misconception(
        "cuts_the_computation",
        "There is not one ring.compute per block. Each of the P blocks is one computation: make one call of ring.compute per "
        "step, with the whole attention of that block inside.",
    ),
    Misconception(
        "one_buffer",
        "What arrives is received into the tensors that are being sent: into=(k, v) gives the transport your only copy to "
        "write to while the neighbour, and you, still read it. Double buffering needs a second pair.",
    ),
    Misconception(
        "writes_what_is_sent",
        "A tensor was written while it was on its way. Until wait() returns, what you post may be read, by the transport and "
        "by you, but not changed: scale a copy.",
    ),
    Misconception(
        "wrong_direction",
        "Blocks go to the previous rank. Neighbours they are, but in this ring everything goes to the next rank and comes from "
        "the previous one: ring.post does that.",
    ),
    Misconception(
        "widens_before_sending",
        "What travels is wider than what came: bfloat16 K and V were turned into float32 before they were sent, which doubles "
        "the bytes of every hop. Send them as they came; where more digits are needed, widen what you compute with.",
    ),
    Misconception(
        "reads_before_waiting",
        "There is a NaN: a buffer was read before its message was there. A receive buffer belongs to the transport until "
        "wait() returns it; only then compute with it, or send it on.",
    ),
    Misconception(
        "looks_at_the_clock",
        "The result depends on how long a hop takes: where links or ranks are slow, blocks are missing. A late block is as "
        "much a part of the sequence as the others. Wait for it, however long that takes; wait() is the only clock.",
    ),
)
MISTAKES = {mistake.name: mistake for mistake in (*OVERLAP, *FORWARD)}


def _run(subject: Any, case: Shards, faults: Faults | None = None) -> Any:
    """Return the outcome of the learner's ring; a rule of exchange that it breaks gets its name."""
    try:
        return case.run(subject, faults)
    except Crashed as crash:
        name = next((name for text, name in _BROKEN.items() if text in crash.counterexample), None)
        if name is None:
            raise
        raise MISTAKES[name].failure(f"{case.text}\n{crash.counterexample}") from None


_BROKEN = {
    "a receive buffer that is also sent": "one_buffer",
    "written while it was sent": "writes_what_is_sent",
}


def _verify(subject: Any, case: Shards, faults: Faults | None = None) -> Any:
    outcome = _run(subject, case, faults)
    for rank, result in enumerate(outcome.results):
        parts = expect_tuple(result, NAMES)
        if any(torch.isnan(torch.as_tensor(part)).any() for part in parts):
            raise MISTAKES["reads_before_waiting"].failure(f"{case.text}: rank {rank}")
    compare_ranks(case, outcome.results, FORWARD)
    return outcome


def order(trace: Any, rank: int) -> list[str]:
    """Return what `rank` did, in order: "post", "compute" and "wait"; neighbours of one kind count once but for compute.

    An exchange takes time unless it was over already, and so does a computation; where times are equal
    a wait comes before the post that follows it, and both before the computation that begins then.
    """
    done = [(e.start, 3, e.start, "compute") for e in trace.computes(rank) if e.end > e.start]
    for exchange in trace.exchanges(rank):
        done += [(exchange.posted, 2, exchange.index, "post"), (exchange.waited, 1, exchange.index, "wait")]
        if exchange.waited == exchange.posted:  # the wait follows its own post
            done[-1] = (exchange.waited, 2, exchange.index + 0.5, "wait")
    names = [name for *_, name in sorted(done)]
    return [name for name, same in itertools.groupby(names) for _ in (same if name == "compute" else [0])]


def expect_overlap(trace: Any, text: str) -> None:
    """Raise the Failure that says where a rank does not compute while its exchange is under way."""
    P = trace.world_size
    right = ["post", "compute", "wait"] * (P - 1) + ["compute"]
    for rank in range(P):
        seen = order(trace, rank)
        if seen == right:
            continue
        example = f"{text}: rank {rank} did {', '.join(seen)}; should do {', '.join(right)}"
        end = max((event.end for event in trace.computes()), default=0.0)
        if (name := _misplaced(seen, P)) in (
            "posts_after_computing",
            "waits_before_computing",
            "overlaps_some_steps",
        ):
            example += f"\non the virtual clock the ring ends after {end:g} s, {P} s are possible"
        if name is None:
            raise Failure("The exchange is not under way while the block is computed.", example)
        raise MISTAKES[name].failure(example)


def _misplaced(seen: Sequence[str], P: int) -> str | None:
    computes = seen.count("compute")
    if list(seen) == ["post", "compute", "wait"] * P:
        return "sends_p_times"
    if computes != P:
        return "cuts_the_computation" if computes else "computes_unseen"
    if list(seen) == ["compute", "post", "wait"] * (P - 1) + ["compute"]:
        return "posts_after_computing"
    if list(seen) == ["post", "wait", "compute"] * (P - 1) + ["compute"]:
        return "waits_before_computing"
    hidden = sum(seen[i : i + 3] == ["post", "compute", "wait"] for i in range(len(seen)))
    return "overlaps_some_steps" if 0 < hidden < P - 1 else None


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
            "values",
            2,
            "visible",
            "out and lse equal full attention for P = 1, 2, 3 and 8",
            _check_values,
            ("one_buffer", "reads_before_waiting", "writes_what_is_sent", "forgets_last_block"),
        ),
        Check(
            "order",
            3,
            "visible",
            "post, compute, wait: no hop is exposed on the virtual clock",
            _check_order,
            ("posts_after_computing", "waits_before_computing", "computes_unseen", "cuts_the_computation"),
            kind="speed",
        ),
        Check(
            "traffic",
            2,
            "visible",
            "P − 1 exchanges with the next rank, exactly the bytes of K and V, in their dtype",
            _check_traffic,
            (
                "sends_p_times",
                "splits_the_exchange",
                "repeats_heads_on_the_wire",
                "widens_before_sending",
                "wrong_direction",
            ),
            kind="cost",
        ),
        Check(
            "eight_ranks",
            2,
            "stress",
            "eight ranks, several heads, every hop hidden",
            _check_eight_ranks,
            ("overlaps_some_steps",),
            kind="speed",
        ),
        Check(
            "any_network",
            1,
            "stress",
            "the same answers where links, ranks or posts are slow",
            _check_any_network,
            ("looks_at_the_clock",),
        ),
        Check(
            "memory",
            1,
            "held-out",
            "two blocks, whatever the number of ranks",
            _check_memory,
            ("keeps_every_block",),
            kind="cost",
        ),
    ),
)
