"""Checks of 11.uneven: a double-buffered ring over shards whose lengths other ranks do not know in advance.

The checks recognise messages with K and V by their four axes. Messages about lengths have fewer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ringlab.comm.trace import Exchange, Trace
from ringlab_course.checking.answers import expect_tuple, has_nan
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure, NotWritten, broken_rule
from ringlab_course.checking.faults import Faults
from ringlab_course.checking.growth import keeps_every_block
from ringlab_course.checking.numbers import NAMES
from ringlab_course.checking.overlap import MISTAKES as ANY_RINGS
from ringlab_course.checking.overlap import expect_overlap
from ringlab_course.checking.positions import Shards, answered_ranks, shards
from ringlab_course.checking.wrong_answers import mistakes_of

OWN = (
    "length_unknown", "length_of_another_block", "leaves_with_nothing", "swaps_keys_and_values", "pads_to_the_longest",
    "talks_too_much", "counts_padding",
)  # fmt: skip
OF_ANY_RING = (
    "forgets_last_block", "forgets_own_block", "never_uses_the_visitor", "sends_own_block_again", "counts_to_three",
    "sends_p_times", "gathers_everything", "keeps_every_block", "does_not_unpack", "never_waits", "posts_after_computing",
    "waits_before_computing", "overlaps_some_steps", "computes_unseen", "cuts_the_computation", "one_buffer",
    "writes_what_is_sent", "reads_before_waiting", "looks_at_the_clock",
)  # fmt: skip
"""Mistakes that are described in exercises 05 and 06."""
TALK = 64
"""The bytes per rank that a rank may send to make lengths known."""


def reason(crash: Crashed, lengths: Sequence[int]) -> str | None:
    """Return the name of the mistake that made the ranks break off, or None if it is unknown."""
    told = crash.counterexample
    if name := broken_rule(crash):
        return name
    if "'tuple'" in told or "a tuple of" in told:
        return "does_not_unpack"
    if "MismatchError" in crash.message:
        if len(set(lengths)) == 1:
            return None
        numbers = [int(number) for number in re.findall(r"\(exchange (\d+)", told)]
        return "length_of_another_block" if min(numbers, default=0) > 0 else "length_unknown"
    if "ended without it" not in told and "never waited" in told:
        return "never_waits"
    stuck = any(name in crash.message for name in ("DeadlockError", "UnreceivedError", "PeerDiedError"))
    circle = "cycle: " in told and "cycle: none" not in told
    return "leaves_with_nothing" if stuck and 0 in lengths and not circle else None


def _run(subject: Any, case: Shards, faults: Faults | None = None) -> Any:
    try:
        return subject.run_ring(case.world_size, case.qs, case.ks, case.vs, faults=faults)
    except Crashed as crash:
        name = reason(crash, [q.shape[-2] for q in case.qs])
        if name is None:
            raise
        raise STAGE.misconception(name).failure(f"{case.text}\n{crash.counterexample}") from None


def _answers(case: Shards, outcome: Any) -> Iterator[Answered]:
    """Yield each rank's answer. Raises: Failure for NaN, which fills a buffer until a message arrives."""
    for rank, result in enumerate(outcome.results):
        parts = expect_tuple(result, NAMES)
        if has_nan(*parts):
            raise STAGE.misconception("reads_before_waiting").failure(f"{case.text}: rank {rank}")
    yield from answered_ranks(case, outcome.results)


def _verify(subject: Any, *cases: Shards, faults: Faults | None = None) -> list[Any]:
    """Return the outcomes of the learner's program.

    Raises: Failure if one is wrong. If it names a mistake, that mistake explains all cases.
    """
    outcomes: list[Any] = []

    def answers() -> Iterator[Answered]:
        for case in cases:
            outcomes.append(_run(subject, case, faults))
            yield from _answers(case, outcomes[-1])

    compare_all(answers())
    return outcomes


def blocks_only(trace: Trace) -> Trace:
    """Return the trace without the exchanges of lengths."""
    events = [
        e for e in trace.events if not isinstance(e, Exchange) or any(len(shape) == 4 for shape in e.shapes)
    ]
    return Trace(trace.world_size, events)


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    sizes = ((2,), 2), ((1, 1), 1), ((2, 2), 4), ((2, 2, 2), 2)
    _verify(subject, *(shards(rng, lengths, 1, 1, D) for lengths, D in sizes))


def _check_ragged(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, *(shards(rng, lengths, 1, 1, 2) for lengths in ((1, 2), (2, 1, 3))))


def _check_empty(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, *(shards(rng, lengths, 1, 1, 2) for lengths in ((2, 0), (0, 1, 2), (0, 0, 3))))


def _check_order(subject: Any, rng: np.random.Generator) -> None:
    """Check that no hop of a block is exposed.

    The last case needs so much CPU time that the judge can tell whether it was spent inside `ring.compute`.
    """
    sizes = ((2, 2), 1, 2), ((1, 3, 2), 1, 2), ((768, 760), 4, 64)
    cases = [shards(rng, lengths, H, H, D) for lengths, H, D in sizes]
    for case, outcome in zip(cases, _verify(subject, *cases), strict=True):
        expect_overlap(blocks_only(outcome.trace), case.text)


def _check_traffic(subject: Any, rng: np.random.Generator) -> None:
    sizes = ((3,), 1, 1), ((40, 10, 25), 1, 1), ((30, 8, 20, 16), 4, 2)
    cases = [shards(rng, lengths, H, K, 8) for lengths, H, K in sizes]
    for case, outcome in zip(cases, _verify(subject, *cases), strict=True):
        _expect_neighbours(blocks_only(outcome.trace), case.text)
        _expect_bytes(case, outcome.trace)


def _expect_neighbours(trace: Trace, text: str) -> None:
    """Raise Failure unless each rank sends P − 1 blocks, K together with V, to the next rank only."""
    P = trace.world_size
    for rank in range(P):
        peers, rounds = trace.peers(rank), trace.rounds(rank)
        if peers - {(rank + 1) % P}:
            raise STAGE.misconception("gathers_everything").failure(
                f"{text}: rank {rank} sends blocks to {sorted(peers)}"
            )
        if rounds == P:
            raise STAGE.misconception("sends_p_times").failure(
                f"{text}: rank {rank} sent {rounds} blocks, {P - 1} are needed"
            )
        if rounds != P - 1:
            raise Failure(
                "Blocks do not make P − 1 exchanges, K and V together in each.",
                f"{text}: rank {rank} made {rounds} exchanges of blocks, {P - 1} are needed",
            )


def _expect_bytes(case: Shards, trace: Trace) -> None:
    P = case.world_size
    longest = max(case.block_bytes(origin) for origin in range(P))
    for rank in range(P):
        exact = sum(case.block_bytes((rank - step) % P) for step in range(P - 1))
        sent, talk = trace.bytes_sent(rank), TALK * P
        example = f"{case.text}: rank {rank} sent {sent:,} bytes, K and V take {exact:,} and lengths at most {talk:,}"
        if sent > exact + talk:
            padded = (P - 1) * longest <= sent <= (P - 1) * longest + talk
            raise STAGE.misconception("pads_to_the_longest" if padded else "talks_too_much").failure(example)
        if sent < exact:
            raise Failure("Fewer bytes travel than K and V hold.", example)


def _check_eight_ranks(subject: Any, rng: np.random.Generator) -> None:
    lengths = [int(n) for n in rng.integers(1, 4, 8)]
    # only one empty block, because with two some mistakes give the same result on rank 0
    lengths[3], lengths[5] = 0, 4
    _verify(subject, shards(rng, lengths, 4, 2, 8))


def _check_any_network(subject: Any, rng: np.random.Generator) -> None:
    """Check that late posts, slow links and a slow rank change no result.

    Each run has inputs of its own. The network is named as the cause only if another run without its faults
    is right.
    """
    _verify(subject, shards(rng, (2, 1, 2), 1, 1, 2))
    seed = int(rng.integers(1 << 30))
    for name, faults, text in (
        ("writes_what_is_sent", Faults(seed, late=1.0), "every exchange posted as late as a transport may"),
        ("looks_at_the_clock", Faults(seed, delay=8.0), "links of different speed"),
        ("looks_at_the_clock", Faults(seed, slow=(1, 8.0)), "one rank eight times as slow"),
    ):
        faulty, plain = (shards(rng, (2, 1, 2), 1, 1, 2) for _ in range(2))
        try:
            _verify(subject, faulty, faults=faults)
        except NotWritten:
            raise
        except Failure as failure:
            _verify(subject, plain)
            raise STAGE.misconception(name).failure(f"{text}\n{failure.counterexample}") from None


def _check_memory(subject: Any, rng: np.random.Generator) -> None:
    """Check that a rank's peak memory grows by at most one block from 3 to 10 ranks.

    A block takes 4 MiB, which is large compared with whole pages.
    """
    few, many = (shards(rng, [4] * P, 1, 1, 131072) for P in (3, 10))
    outcomes = _verify(subject, few, many)
    peaks = [max(report.peak_bytes for report in outcome.memory) for outcome in outcomes]
    if keeps_every_block(peaks, 10, many.block_bytes(0)):
        raise STAGE.misconception("keeps_every_block").failure(
            f"4 tokens on every rank, a K/V block of {many.block_bytes(0):,} bytes: "
            f"peak {peaks[0]:,} bytes with P=3, {peaks[1]:,} with P=10"
        )


HINTS = (
    "Before a block arrives, its receiver has to make room for it. Which rank knows its length, and how does the receiver "
    "learn it?",
    "First ring.all_gather(torch.tensor(k.shape[-2])): a list of all ranks' lengths, on every rank. Then, in each step but the last, "
    "work = ring.post(k, v, length=…), the computation, k, v = work.wait(). The length is that of the block due next.",
    r"in step $t$: here is the block of $r - t$, and on its way that of $r - t - 1$, with $L_{(r-t-1) \bmod P}$ tokens",
)

STAGE = Stage(
    id="11.uneven",
    function="uneven_ring",
    title="A double-buffered ring over shards of any length",
    kind="ring",
    helpers=("nothing_seen", "attend"),
    hints=HINTS,
    misconceptions=(*map(mistakes_of("11.uneven"), OWN), *(ANY_RINGS[name] for name in OF_ANY_RING)),
    checks=(
        Check("values", 2, "visible", "equal shards: out and lse of full attention", _check_values),
        Check(
            "ragged", 3, "visible", "shards of different lengths, which a rank has to ask for", _check_ragged
        ),
        Check("empty", 1, "visible", "ranks without a token", _check_empty),
        Check(
            "traffic",
            2,
            "visible",
            "P − 1 exchanges of blocks with the next rank, no token more than there is",
            _check_traffic,
            kind="cost",
        ),
        Check(
            "order",
            2,
            "visible",
            "post, compute, wait: no block's hop is exposed on the virtual clock",
            _check_order,
            kind="speed",
        ),
        Check("eight_ranks", 1, "visible", "eight ranks, shared heads", _check_eight_ranks),
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
