"""Checks of 09.couriers: the values of the backward ring, its messages, memory and overlap; its common mistakes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ringlab import layout as layouts
from ringlab_course.checking.answers import expect_array, expect_tuple
from ringlab_course.checking.backward import NAMES, Problem, problem
from ringlab_course.checking.backward_mistakes import COMPARED
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure, reason
from ringlab_course.checking.faults import Faults
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("09.couriers")

BEHAVES = (
    mistake("reads_before_waiting"),
    mistake("overflowing_ring"),
    mistake("writes_what_is_sent"),
    mistake("one_buffer"),
    mistake("does_not_unpack"),
    mistake("never_waits"),
    mistake("leaves_the_ring"),
    mistake("assumes_equal_lengths"),
    mistake("gathers_everything"),
    mistake("sends_kv_home"),
    mistake("sends_to_itself"),
    mistake("starts_after_the_owner"),
    mistake("repeats_heads_on_the_wire"),
    mistake("narrow_couriers"),
    mistake("widens_the_blocks"),
    mistake("keeps_every_block"),
    mistake("splits_the_exchange"),
    mistake("computes_unseen"),
    mistake("nothing_hidden"),
    mistake("waits_for_the_courier"),
)
MISTAKES = (*COMPARED, *BEHAVES)
NAMED = {each.name: each for each in MISTAKES}


COURIER = 4
"""Bytes of one element of dK or dV on its way, float32."""


def run(subject: Any, given: Problem, faults: Faults | None = None) -> Any:
    """The outcome of the learner's program; a known reason to break off gets its name."""
    try:
        return subject.run_ring(given.world_size, *given.per_rank, faults=faults, positions=given.positions)
    except Crashed as crash:
        name = reason(crash, ragged=len(set(given.lengths)) > 1)
        if name is None:
            raise
        raise NAMED[name].failure(f"{given.text}\n{crash.counterexample}") from None


def _answers(subject: Any, given: Problem, faults: Faults | None = None) -> Iterator[Answered]:
    """What every rank returned, with what it should have."""
    results = run(subject, given, faults).results
    for rank, answer in enumerate(results):
        right = given.truth[rank]
        parts = expect_tuple(answer, NAMES)
        text = f"{given.text}: rank {rank}"
        got = [
            expect_array(part, x.shape, name=name) for name, part, x in zip(NAMES, parts, right, strict=True)
        ]
        if any(np.isnan(part).any() for part in got):
            raise NAMED["reads_before_waiting"].failure(text)
        yield Answered(tuple(got), right, given.bound(rank), (rank, given), NAMES, text)


def _verify(subject: Any, cases: Iterable[Problem], faults: Faults | None = None) -> None:
    """Compare (dq, dk, dv) of every rank with the oracle's, the smallest case first."""
    compare_all((answered for case in cases for answered in _answers(subject, case, faults)), COMPARED)


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    sizes = ((2, 1, 2), (4, 2, 2), (6, 3, 2), (12, 3, 4))
    _verify(subject, [problem(rng, layouts.contiguous(S, P), D=D) for S, P, D in sizes])


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    made = [
        layouts.striped(6, 3),
        layouts.zigzag(12, 3),
        layouts.dealt(12, 3, chunk=1, folded=True),
        layouts.striped(8, 4),
    ]
    _verify(subject, [problem(rng, layout) for layout in made])


def _check_ragged(subject: Any, rng: np.random.Generator) -> None:
    made = [layouts.contiguous(3, 2), layouts.striped(5, 3), layouts.zigzag(7, 3), layouts.contiguous(2, 3)]
    _verify(subject, [problem(rng, layout) for layout in made])


def _check_eight_ranks(subject: Any, rng: np.random.Generator) -> None:
    """Eight ranks, shared heads, posts as late as a transport may make them."""
    for layout in (layouts.zigzag(32, 8), layouts.striped(19, 8)):
        _verify(subject, [problem(rng, layout, 4, 2, 8)], Faults(seed=int(rng.integers(1 << 30)), late=0.5))


def _check_large(subject: Any, rng: np.random.Generator) -> None:
    """Scores near 150 whose differences are small: exp of one is infinite in float32, all weights are near 1."""
    cases = [
        problem(rng, layouts.zigzag(12, 3), D=4, lift=lift, text=", large scores") for lift in (20.0, 150.0)
    ]
    try:
        _verify(subject, cases)
    except Failure as failure:
        if failure.misconception == "reads_before_waiting":
            raise NAMED["overflowing_ring"].failure(failure.counterexample) from None
        raise


def _check_bfloat16(subject: Any, rng: np.random.Generator) -> None:
    """bfloat16 comes in; gradients are added up, sent and returned in float32."""
    given = problem(rng, layouts.zigzag(64, 8), 2, 1, 16, narrow=True)
    try:
        for answer, right in zip(run(subject, given).results, given.truth, strict=True):
            for name, part, like in zip(NAMES, expect_tuple(answer, NAMES), right, strict=True):
                expect_array(part, like.shape, name=name, dtype="float32")
        _verify(subject, [given])
    except Failure as failure:
        if failure.misconception is None:
            raise NAMED["narrow_couriers"].failure(failure.counterexample or failure.message) from None
        raise


def _check_hops(subject: Any, rng: np.random.Generator) -> None:
    for layout in (layouts.contiguous(3, 1), layouts.contiguous(6, 3), layouts.zigzag(16, 8)):
        given = problem(rng, layout)
        expect_rounds(_travels(subject, given), given)


def _check_bytes(subject: Any, rng: np.random.Generator) -> None:
    cases = [problem(rng, layouts.zigzag(12, 3), H, K, 4) for H, K in ((4, 2), (3, 1))]
    cases += [
        problem(rng, layouts.striped(7, 3), 2, 1, 4),
        problem(rng, layouts.contiguous(8, 4), narrow=True),
    ]
    for given in cases:
        _travels(subject, given)


def _travels(subject: Any, given: Problem) -> Any:
    """The trace of the learner's program, once it has sent the right bytes to the right ranks."""
    trace = run(subject, given).trace
    expect_next(trace, given)
    try:
        expect_bytes(trace, given)
    except Failure as failure:
        if failure.misconception == "ends_at_the_neighbour":
            _verify(subject, [given])  # a hop is missing: do the values lack it, too?
            raise NAMED["starts_after_the_owner"].failure(failure.counterexample) from None
        raise
    return trace


def expect_next(trace: Any, given: Problem) -> None:
    """Every message goes to the next rank."""
    P = given.world_size
    for rank in range(P):
        if strangers := trace.peers(rank) - {(rank + 1) % P}:
            example = f"{given.text}: rank {rank} sends to {', '.join(map(str, sorted(strangers)))}"
            raise NAMED["gathers_everything"].failure(example)


def expect_rounds(trace: Any, given: Problem) -> None:
    """From P exchanges, in which K/V and couriers travel together, to 2P − 1, in which they do not."""
    P = given.world_size
    fewest, most = (P, 2 * P - 1) if P > 1 else (0, 0)
    for rank in range(P):
        rounds = trace.rounds(rank)
        example = f"{given.text}: rank {rank} made {rounds} exchanges, {fewest} to {most} are enough"
        if rounds > most:
            raise NAMED["splits_the_exchange"].failure(example)
        if rounds < fewest:
            raise Failure("There are fewer exchanges than the couriers have hops.", example)


def bytes_of(given: Problem, rank: int) -> tuple[int, int]:
    """The bytes that `rank` sends of K/V, P − 1 blocks, and of dK/dV, P blocks."""
    P, element = given.world_size, given.ks[0].element_size()
    if P == 1:
        return 0, 0
    of = [given.ks[(rank - step) % P].numel() + given.vs[(rank - step) % P].numel() for step in range(P)]
    return element * sum(of[:-1]), COURIER * sum(of)


def expect_bytes(trace: Any, given: Problem) -> None:
    """K/V make P − 1 hops as they came, dK/dV make P in float32, and nothing else travels."""
    if given.world_size == 1:
        if sent := trace.bytes_sent(0):
            raise NAMED["sends_to_itself"].failure(f"{given.text}: it sent {sent:,} bytes to itself")
        return
    P, group = given.world_size, given.qs[0].shape[1] // given.ks[0].shape[1]
    narrow = given.ks[0].element_size() < COURIER
    for rank in range(P):
        blocks, couriers = bytes_of(given, rank)
        sent = trace.bytes_sent(rank)
        if sent == blocks + couriers:
            continue
        home = given.ks[(rank + 1) % P].nbytes + given.vs[(rank + 1) % P].nbytes
        named = {
            blocks + couriers + home: "sends_kv_home",
            blocks + couriers - COURIER * home // given.ks[0].element_size(): "ends_at_the_neighbour",
        }
        if group > 1:
            named |= {
                b * blocks + c * couriers: "repeats_heads_on_the_wire"
                for b, c in ((group, group), (1, group), (group, 1))
            }
        if narrow:
            named |= {blocks + couriers // 2: "narrow_couriers", 2 * blocks + couriers: "widens_the_blocks"}
        example = (
            f"{given.text}: rank {rank} sent {sent:,} bytes; K and V take {blocks:,}, dK and dV {couriers:,}, "
            f"{blocks + couriers:,} together"
        )
        if (name := named.get(sent)) is not None:
            raise NAMED[name].failure(example)
        more = "More" if sent > blocks + couriers else "Fewer"
        raise Failure(
            f"{more} bytes travel than K and V in P − 1 hops and dK and dV, in float32, in P.", example
        )


def _check_memory(subject: Any, rng: np.random.Generator) -> None:
    """A rank's peak is the same among 4 and among 9, but for what lies ready to be sent: shards are equal, S is not.

    Five blocks of 2 MiB stand out from what the judge, who reads whole pages from the system, sees besides.
    """
    peaks = []
    for P in (4, 9):
        given = _large(rng, P)
        peaks.append(max(report.peak_bytes for report in run(subject, given).memory))
    block = given.ks[0].nbytes + given.vs[0].nbytes
    if peaks[1] > peaks[0] + 2 * block:
        raise NAMED["keeps_every_block"].failure(
            f"4 tokens on every rank, a K/V block of {block:,} bytes: peak {peaks[0]:,} bytes with P=4, {peaks[1]:,} with P=9"
        )


def _large(rng: np.random.Generator, P: int) -> Problem:
    """4 tokens of head dim 65,536 on every rank; memory does not depend on values."""
    D = 65536
    row = torch.from_numpy(rng.standard_normal((1, 1, 4, D)).astype(np.float32))
    copies = [[row.clone() for _ in range(P)] for _ in range(5)]
    lses = [torch.full((1, 1, 4), 400.0) for _ in range(P)]
    return Problem(*copies, lses, [torch.arange(4 * r, 4 * r + 4) for r in range(P)], f"P={P}")


def _check_hidden(subject: Any, rng: np.random.Generator) -> None:
    """On the virtual clock, 1 s a block and ½ s a hop, only the last hop of the couriers is exposed."""
    for P in (2, 5):
        given = problem(rng, layouts.zigzag(4 * P, P))
        trace = run(subject, given).trace
        counts = {len([e for e in trace.computes(rank) if e.end > e.start]) for rank in range(P)}
        if counts != {P}:
            example = (
                f"{given.text}: a rank made {min(counts)} computations through ring.compute, should make {P}"
            )
            raise NAMED["computes_unseen"].failure(example)
        ends = [e.end for e in trace.computes()] + [e.done for e in trace.exchanges()]
        if max(ends) <= P + 0.5 + 1e-9:
            continue
        waited = [e.exposed > 0 for e in trace.exchanges(0)]
        example = (
            f"{given.text}: done after {max(ends):g} s, {P} s of them computing; {P + 0.5:g} s are enough. "
            f"Rank 0 waits for {sum(waited)} of its {len(waited)} exchanges"
        )
        raise NAMED["nothing_hidden" if all(waited) else "waits_for_the_courier"].failure(example)


HINTS = (
    "When your own block comes back to you at last, which ranks have seen its keys? And where was, all the time, the sum of what they had to say?",
    "P steps: post K and V (not in the last step), compute what the block that is here adds, wait for the courier that belongs to it (not "
    "in the first step), add, post the courier, then wait for the next K and V. After the last step one more courier arrives: your own.",
    r"step $t$, $o = (r-t) \bmod P$: $\;C_o \leftarrow C_o + (dK, dV)_{r,o}$, then $C_o$ goes to $r+1$; "
    r"after $t = P-1$ the courier that arrives is $C_r = \sum_{r'} (dK, dV)_{r',r}$",
)

STAGE = Stage(
    id="09.couriers",
    function="ring_backward",
    title="The backward ring",
    kind="ring",
    helpers=("row_delta", "block_backward"),
    hints=HINTS,
    misconceptions=MISTAKES,
    checks=(
        Check("values", 3, "visible", "dQ, dK and dV of every rank, contiguous, P = 1, 2, 3", _check_values),
        Check("layouts", 2, "visible", "striped, zig-zag and folded layouts", _check_layouts),
        Check("ragged", 1, "visible", "shards of different lengths, and empty ones", _check_ragged),
        Check("hops", 2, "visible", "K/V make P − 1 hops, dK/dV make P, all to the next rank", _check_hops, kind="cost"),
        Check("eight_ranks", 1, "stress", "eight ranks, shared heads, late posts", _check_eight_ranks),
        Check("large", 1, "stress", "scores near 150", _check_large),
        Check("bfloat16", 1, "stress", "bfloat16 inputs, sums in float32", _check_bfloat16),
        Check("hidden", 2, "visible", "hops hide behind computations, but for the last one", _check_hidden, kind="speed"),
        Check("bytes", 2, "held-out", "exact bytes: shared heads, ragged, bfloat16", _check_bytes, kind="cost"),
        Check("memory", 2, "held-out", "memory does not grow with the number of ranks", _check_memory, kind="cost"),
    ),
)  # fmt: skip
