"""Checks of 09.couriers: the values of the backward ring, its messages, work, memory and overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ringlab import layout as layouts
from ringlab_course.checking.answers import expect_array, expect_tuple, is_close, relative_error
from ringlab_course.checking.backward import NAMES, Problem, problem
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import ROUNDED, Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure, reason
from ringlab_course.checking.faults import Faults
from ringlab_course.checking.growth import keeps_every_block
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of

mistake = mistakes_of("09.couriers")

COURIER = 4
"""The bytes of one element of dK or dV in a message, in float32."""


def run(subject: Any, given: Problem, faults: Faults | None = None) -> Any:
    """Return the outcome of the learner's program.

    Raises: the named mistake if the program broke off for a known reason.
    """
    others = {"positions": given.positions, "window": given.window or sum(given.lengths)}
    try:
        return subject.run_ring(given.world_size, *given.per_rank, faults=faults, **others)
    except Crashed as crash:
        name = reason(crash, ragged=len(set(given.lengths)) > 1)
        if "cannot reshape tensor of 0 elements" in crash.counterexample:
            name = "reshapes_nothing"
        if name is None:
            raise
        raise mistake(name).failure(f"{given.text}\n{crash.counterexample}") from None


def _answers(outcome: Any, given: Problem) -> Iterator[Answered]:
    """Yield each rank's answer with the right one."""
    for rank, answer in enumerate(outcome.results):
        right = given.truth[rank]
        parts = expect_tuple(answer, NAMES)
        text = f"{given.text}: rank {rank}"
        got = [
            expect_array(part, x.shape, name=name) for name, part, x in zip(NAMES, parts, right, strict=True)
        ]
        if any(np.isnan(part).any() for part in got):
            raise mistake("reads_before_waiting").failure(text)
        yield Answered(tuple(got), right, given.bound(rank), names=NAMES, text=text)


def _verify(subject: Any, cases: Iterable[Problem], faults: Faults | None = None) -> None:
    """Compare each rank's (dq, dk, dv) with the oracle's. Cases are in order of size."""
    runs = ((run(subject, case, faults), case) for case in cases)
    compare_all(answered for ran in runs for answered in _answers(*ran))


def _right(subject: Any, given: Problem) -> Any:
    """Return the outcome of a run after comparing its values.

    Messages, work and memory count only if values are right.
    """
    outcome = run(subject, given)
    compare_all(_answers(outcome, given))
    return outcome


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on queries that see all keys up to their own position. Cases are in order of size."""
    sizes = ((2, 1, 2), (4, 2, 2), (6, 3, 2), (12, 3, 4))
    _verify(subject, [problem(rng, layouts.contiguous(S, P), D=D) for S, P, D in sizes])


def _check_window(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on windows that end inside a shard, at its end and beyond it.

    In some cases a rank sees nothing of a block.
    """
    sizes = ((4, 1, 2), (6, 2, 2), (9, 3, 4), (12, 4, 3), (12, 3, 6))
    _verify(subject, [problem(rng, layouts.contiguous(S, P), D=3, window=window) for S, P, window in sizes])


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    made = [
        (layouts.striped(6, 3), 1, 1, 4),
        (layouts.zigzag(12, 3), 2, 1, 5),
        (layouts.dealt(12, 3, chunk=1, folded=True), 4, 2, 7),
        (layouts.striped(8, 4), 1, 1, None),
    ]
    _verify(subject, [problem(rng, layout, H, K, window=window) for layout, H, K, window in made])


def _check_ragged(subject: Any, rng: np.random.Generator) -> None:
    made = [
        (layouts.contiguous(3, 2), None),
        (layouts.striped(5, 3), None),
        (layouts.zigzag(7, 3), None),
        (layouts.contiguous(2, 3), None),
        (layouts.contiguous(7, 4), 3),
    ]
    _verify(subject, [problem(rng, layout, window=window) for layout, window in made])


def _check_eight_ranks(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on eight ranks with shared heads and posts as late as a transport may make them."""
    for layout, window in ((layouts.zigzag(32, 8), 9), (layouts.striped(19, 8), None)):
        given = problem(rng, layout, 4, 2, 8, window=window)
        _verify(subject, [given], Faults(seed=int(rng.integers(1 << 30)), late=0.5))


def _check_large(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on scores near 150 that differ little.

    exp of such a score is infinite in float32, but no key's weight vanishes.
    """
    cases = [
        problem(rng, layouts.zigzag(12, 3), D=4, lift=lift, text=", large scores") for lift in (20.0, 150.0)
    ]
    try:
        _verify(subject, cases)
    except Failure as failure:
        if failure.misconception == "reads_before_waiting":
            raise mistake("overflowing_ring").failure(failure.counterexample) from None
        raise


def _check_bfloat16(subject: Any, rng: np.random.Generator) -> None:
    """Check that gradients of bfloat16 inputs are summed, sent and returned in float32."""
    for layout, H in ((layouts.contiguous(6, 3), 1), (layouts.zigzag(64, 8), 2)):
        given = problem(rng, layout, H, 1, 16, narrow=True)
        outcome = run(subject, given)
        for answer, right in zip(outcome.results, given.truth, strict=True):
            for name, part, like in zip(NAMES, expect_tuple(answer, NAMES), right, strict=True):
                expect_array(part, like.shape, name=name, dtype="float32")
        answers = list(_answers(outcome, given))
        try:
            compare_all(answers)
        except Failure as failure:
            if failure.misconception is None and _rounded_on_the_way(answers):
                raise mistake("narrow_couriers").failure(failure.counterexample) from None
            raise


def _rounded_on_the_way(answers: Iterable[Answered]) -> bool:
    """Return whether dq is right, and the errors of dk and dv are as small as those of messages in bfloat16."""
    return all(
        is_close(each.answer[0], each.truth[0], each.bound)
        and relative_error(each.answer[1:], each.truth[1:]) < ROUNDED
        for each in answers
    )


def _check_hops(subject: Any, rng: np.random.Generator) -> None:
    """Count messages on one rank, and for equal shards, shared heads, ragged shards and bfloat16 inputs."""
    for layout, H, K, narrow in (
        (layouts.contiguous(3, 1), 1, 1, False),
        (layouts.contiguous(6, 3), 1, 1, False),
        (layouts.zigzag(12, 3), 4, 2, False),
        (layouts.striped(7, 3), 2, 1, False),
        (layouts.contiguous(8, 4), 1, 1, True),
        (layouts.zigzag(16, 8), 1, 1, False),
    ):
        given = problem(rng, layout, H, K, narrow=narrow)
        trace = _right(subject, given).trace
        expect_next(trace, given)
        expect_bytes(trace, given)
        expect_rounds(trace, given)


LONG = (1536, 2), (4, 64)
"""The (tokens, ranks) and (heads, head dim) of a run that takes long."""


def _check_work(subject: Any, rng: np.random.Generator) -> None:
    """Check that each rank computes with every block in which it sees a key, and with no other block.

    In the last case, the work takes so long that the judge can tell whether it is done inside `ring.compute`.
    """
    for layout, window, H, D in (
        (layouts.contiguous(6, 3), None, 1, 2),
        (layouts.contiguous(12, 4), 3, 1, 2),
        (layouts.zigzag(16, 4), 4, 1, 2),
        (layouts.zigzag(*LONG[0]), None, *LONG[1]),
    ):
        given = problem(rng, layout, H, H, D, window=window)
        expect_work(_right(subject, given).trace, given)


def expect_work(trace: Any, given: Problem) -> None:
    """Raise Failure unless each rank makes one computation for each block in which it sees a key."""
    P = given.world_size
    for rank in range(P):
        needed = sum(bool(given.mask(rank, owner).any()) for owner in range(P))
        made = len([event for event in trace.computes(rank) if event.end > event.start])
        if made == needed:
            continue
        example = (
            f"{given.text}: rank {rank} sees keys of {needed} of {P} blocks, but made {made} computations"
        )
        raise mistake("computes_what_nobody_sees" if made > needed else "computes_unseen").failure(example)


def expect_next(trace: Any, given: Problem) -> None:
    """Raise Failure unless every message goes to the next rank."""
    P = given.world_size
    for rank in range(P):
        if strangers := trace.peers(rank) - {(rank + 1) % P}:
            example = f"{given.text}: rank {rank} sends to {', '.join(map(str, sorted(strangers)))}"
            raise mistake("gathers_everything").failure(example)


def expect_rounds(trace: Any, given: Problem) -> None:
    """Raise Failure unless a rank makes P to 2P − 1 exchanges.

    P exchanges are enough if K/V and couriers travel together, and 2P − 1 if they travel apart.
    """
    P = given.world_size
    fewest, most = (P, 2 * P - 1) if P > 1 else (0, 0)
    for rank in range(P):
        rounds = trace.rounds(rank)
        example = f"{given.text}: rank {rank} made {rounds} exchanges, {fewest} to {most} are enough"
        if rounds > most:
            raise mistake("splits_the_exchange").failure(example)
        if rounds < fewest:
            raise Failure("There are fewer exchanges than hops of a courier: it makes P.", example)


def bytes_of(given: Problem, rank: int) -> tuple[int, int]:
    """Return the bytes that `rank` sends: those of P − 1 K/V blocks, and those of dK/dV for P blocks."""
    P, element = given.world_size, given.ks[0].element_size()
    if P == 1:
        return 0, 0
    of = [given.ks[(rank - step) % P].numel() + given.vs[(rank - step) % P].numel() for step in range(P)]
    return element * sum(of[:-1]), COURIER * sum(of)


def expect_bytes(trace: Any, given: Problem) -> None:
    """Raise Failure unless each rank sends K/V in P − 1 hops and float32 dK/dV in P hops, to the byte."""
    if given.world_size == 1:
        if sent := trace.bytes_sent(0):
            raise mistake("sends_to_itself").failure(f"{given.text}: it sent {sent:,} bytes to itself")
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
            blocks + couriers - COURIER * home // given.ks[0].element_size(): "starts_after_the_owner",
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
            raise mistake(name).failure(example)
        more = "More" if sent > blocks + couriers else "Fewer"
        raise Failure(
            f"{more} bytes travel than K and V need for P − 1 hops, and dK and dV in float32 for P.", example
        )


def _check_memory(subject: Any, rng: np.random.Generator) -> None:
    """Check that a rank's peak memory grows by at most two blocks from 4 to 16 ranks with equal shards.

    The two blocks allow for data that is ready to be sent. With 4 tokens of head dim 32,768 per rank, the
    twelve additional blocks of 1 MiB are large compared with other memory in the judge's measurement, which
    counts whole pages.
    """
    peaks = []
    for P in (4, 16):
        given = problem(rng, layouts.contiguous(4 * P, P), D=32768)
        peaks.append(max(report.peak_bytes for report in _right(subject, given).memory))
    block = given.ks[0].nbytes + given.vs[0].nbytes
    if keeps_every_block(peaks, 16, block, spare=2):
        raise mistake("keeps_every_block").failure(
            f"4 tokens on every rank, a K/V block of {block:,} bytes: peak {peaks[0]:,} bytes with P=4, {peaks[1]:,} with P=16"
        )


def _check_hidden(subject: Any, rng: np.random.Generator) -> None:
    """Check that only the last hop of the couriers is exposed.

    On the virtual clock a block takes 1 s and a hop ½ s.
    """
    for S, P, H, D in ((8, 2, 1, 2), (20, 5, 1, 2), (*LONG[0], *LONG[1])):
        given = problem(rng, layouts.zigzag(S, P), H, H, D)
        trace = _right(subject, given).trace
        expect_work(trace, given)
        ends = [e.end for e in trace.computes()] + [e.done for e in trace.exchanges()]
        if max(ends) <= P + 0.5 + 1e-9:
            continue
        waited = [e.exposed > 0 for e in trace.exchanges(0)]
        example = (
            f"{given.text}: done after {max(ends):g} s, {P} s of them computing; {P + 0.5:g} s are enough. "
            f"Rank 0 waits for {sum(waited)} of its {len(waited)} exchanges"
        )
        raise mistake("nothing_hidden" if all(waited) else "waits_for_the_courier").failure(example)


HINTS = (
    "When your block has been on every rank, who has seen its keys? "
    "And where was the sum of what those ranks had to add?",
    "P steps. In each: post K and V (not in the last), compute what the block adds if you see any of its keys, wait for "
    "its courier (not in the first), add, post the courier, wait for the next K and V. Seeing nothing saves the "
    "computation, never a message. After the last step one more courier arrives: your own.",
    r"step $t$, $o = (r-t) \bmod P$: $\;C_o \leftarrow C_o + (dK, dV)_{r,o}$, then $C_o$ goes to $r+1$; "
    r"after $t = P-1$ the courier that arrives is $C_r = \sum_{r'} (dK, dV)_{r',r}$; "
    r"query $i$ sees key $j$ if $0 \le i - j <$ window",
)

STAGE = Stage(
    id="09.couriers",
    function="ring_backward",
    title="The backward ring",
    kind="ring",
    helpers=("row_delta", "block_backward"),
    hints=HINTS,
    misconceptions=misconceptions_of("09.couriers"),
    checks=(
        Check("values", 2, "visible", "dQ, dK and dV of every rank, contiguous, P = 1, 2, 3", _check_values),
        Check("window", 2, "visible", "a window, and blocks of which a rank sees nothing", _check_window),
        Check("layouts", 2, "visible", "striped, zig-zag and folded layouts, shared heads", _check_layouts),
        Check("ragged", 1, "visible", "shards of different lengths, and empty ones", _check_ragged),
        Check("bfloat16", 1, "visible", "bfloat16 inputs, sums in float32", _check_bfloat16),
        Check("eight_ranks", 1, "stress", "eight ranks, shared heads, late posts", _check_eight_ranks),
        Check("large", 1, "stress", "scores near 150", _check_large),
        Check("hops", 3, "visible", "K/V make P − 1 hops, dK/dV make P, to the byte", _check_hops, kind="cost"),
        Check("work", 1, "visible", "a rank computes only with blocks that it sees", _check_work, kind="cost"),
        Check("memory", 1, "held-out", "memory does not grow with the number of ranks", _check_memory, kind="cost"),
        Check("hidden", 2, "visible", "hops hide behind computations, but for the last one", _check_hidden, kind="speed"),
    ),
)  # fmt: skip
