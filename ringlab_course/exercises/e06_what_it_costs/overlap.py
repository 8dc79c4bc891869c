"""Checks of 06.overlap: a ring that sends a piece of a block and computes with the piece at the same time.

The checks look at the order of a rank's posts, computations and waits on the virtual clock. The judge itself
sees posts, waits, values, bytes and memory, but a computation is only reported by the rank (see
`ringlab_course.judge.network`). A check of exchanges, bytes or memory also compares the values of its runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure, NotWritten, broken_rule
from ringlab_course.checking.faults import Faults
from ringlab_course.checking.growth import keeps_every_block
from ringlab_course.checking.overlap import MISTAKES, OVERLAP, expect_overlap
from ringlab_course.checking.positions import (
    Shards,
    answered_ranks,
    compare_ranks,
    expect_bytes,
    expect_neighbours,
    narrow,
    shards,
)

SHARED = (
    "forgets_last_block", "forgets_own_block", "waits_too_early", "never_uses_the_visitor", "sends_own_block_again",
    "counts_to_three", "sends_p_times", "gathers_everything", "repeats_heads_on_the_wire", "sends_too_many_bytes",
    "keeps_every_block", "does_not_unpack", "leaves_the_ring", "never_waits",
)  # fmt: skip
"""Mistakes that any ring can make, with the descriptions of exercise 05."""


@dataclass(frozen=True)
class Pieced(Shards):
    """The q, k and v of every rank, for a ring that sends each K/V block in pieces."""

    @property
    def pieces(self) -> int:
        return int(self.keywords["pieces"])

    def run(self, subject: Any, faults: Faults | None = None) -> Any:
        """Return the outcome of the learner's ring.

        Raises: the named mistake if the ring breaks a rule of exchange.
        """
        try:
            return super().run(subject, faults)
        except Crashed as crash:
            name = broken_rule(crash)
            if name is None:
                raise
            raise MISTAKES[name].failure(f"{self.text}\n{crash.counterexample}") from None


def _case(
    rng: np.random.Generator, P: int, L: int, pieces: int, H: int = 1, K: int = 1, D: int = 2
) -> Pieced:
    made = shards(rng, [L] * P, H, K, D, text=f", pieces={pieces}")
    return Pieced(made.qs, made.ks, made.vs, made.text, keywords={"pieces": pieces})


def _verify(subject: Any, case: Pieced, faults: Faults | None = None) -> Any:
    """Run the learner's ring, compare its values, and return the outcome."""
    outcome = case.run(subject, faults)
    compare_all(_answered(case, outcome.results))
    return outcome


def _answered(case: Pieced, results: Sequence[Any]) -> Iterator[Answered]:
    return answered_ranks(case, results, MISTAKES["reads_before_waiting"] if case.world_size > 1 else None)


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    sizes = ((1, 2, 1), (1, 2, 2), (2, 1, 1), (2, 4, 2), (3, 2, 1), (3, 2, 2), (3, 5, 3))
    cases = [_case(rng, *size) for size in sizes]
    cases += [narrow(_case(rng, 3, 4, 2, D=4)), _case(rng, 8, 3, 2, 4, 2, 8)]
    compare_all(each for case in cases for each in _answered(case, case.run(subject).results))


def _check_order(subject: Any, rng: np.random.Generator) -> None:
    """Check the order of posts, computations and waits.

    In the last case, the work takes so long that the judge can tell whether it is done inside `ring.compute`.
    """
    for size in ((2, 2, 1), (2, 2, 2), (3, 2, 1), (3, 4, 2), (4, 5, 3), (2, 768, 2, 4, 4, 64)):
        case, pieces = _case(rng, *size), size[2]
        outcome = case.run(subject)
        expect_overlap(outcome.trace, case.text, pieces)
        compare_ranks(case, outcome.results)


def _check_traffic(subject: Any, rng: np.random.Generator) -> None:
    for P, L, pieces, H, K in ((1, 4, 2, 1, 1), (3, 4, 1, 1, 1), (3, 4, 3, 1, 1), (3, 4, 2, 4, 2)):
        case = _case(rng, P, L, pieces, H, K, 4)
        outcome = case.run(subject)
        _expect_direction(outcome.trace, case.text)
        _expect_exchanges(outcome.trace, case)
        expect_bytes(case, outcome.trace, H // K)
        compare_ranks(case, outcome.results)
    _check_as_they_came(subject, narrow(_case(rng, 3, 4, 2, D=4)))


def _expect_direction(trace: Any, text: str) -> None:
    """Raise the Failure of a ring that sends to the previous rank instead of the next."""
    P = trace.world_size
    if P > 2 and all(trace.peers(rank) == {(rank - 1) % P} for rank in range(P)):
        raise MISTAKES["wrong_direction"].failure(f"{text}: rank 0 sends to rank {P - 1}, should send to 1")


def _expect_exchanges(trace: Any, case: Pieced) -> None:
    """Raise the Failure of a ring with a wrong number of exchanges, in the words of this exercise."""
    pieces, tokens = case.pieces, case.ks[0].shape[-2]
    chunks = len(case.ks[0].chunk(pieces, dim=-2))
    rounds = trace.rounds(0)
    if chunks < pieces and rounds == chunks * (case.world_size - 1):
        example = f"{case.text}: {tokens} tokens in {chunks} pieces, should be {pieces}"
        raise MISTAKES["fewer_pieces"].failure(example)
    try:
        expect_neighbours(trace, case.text, pieces)
    except Failure as failure:
        if failure.misconception in MISTAKES:
            raise MISTAKES[failure.misconception].failure(failure.counterexample) from None
        raise


def _check_as_they_came(subject: Any, case: Pieced) -> None:
    """Check that bfloat16 tensors travel as bfloat16."""
    outcome = _verify(subject, case)
    sent, exact = outcome.trace.bytes_sent(0), 2 * case.block_bytes(0)
    if sent == 2 * exact:
        example = f"{case.text}: rank 0 sent {sent:,} bytes, K and V take {exact:,}"
        raise MISTAKES["widens_before_sending"].failure(example)
    expect_bytes(case, outcome.trace)


def _check_eight_ranks(subject: Any, rng: np.random.Generator) -> None:
    """Check values and overlap on eight ranks, and on a long case like the last of `_check_order`."""
    for size in ((8, 3, 2, 4, 2, 8), (2, 768, 2, 4, 4, 64)):
        case = _case(rng, *size)
        outcome = _verify(subject, case)
        expect_overlap(outcome.trace, case.text, case.pieces)


def _check_any_network(subject: Any, rng: np.random.Generator) -> None:
    """Check that late posts, slow links and a slow rank change no result.

    Each run has inputs of its own. The network is named as the cause only if another run without its faults
    is right.
    """
    for name, faults, text in (
        ("writes_what_is_sent", {"late": 1.0}, "every exchange posted as late as a transport may"),
        ("looks_at_the_clock", {"delay": 8.0}, "links of different speed"),
        ("looks_at_the_clock", {"slow": (1, 8.0)}, "one rank eight times as slow"),
    ):
        faulty, plain, seed = _case(rng, 3, 4, 2), _case(rng, 3, 4, 2), int(rng.integers(1 << 30))
        try:
            _verify(subject, faulty, Faults(seed, **faults))
        except NotWritten:
            raise
        except Failure as failure:
            _verify(subject, plain)
            raise MISTAKES[name].failure(f"{text}\n{failure.counterexample}") from None


def _check_memory(subject: Any, rng: np.random.Generator) -> None:
    """Check that a rank needs at most one block and one piece more than a lone rank, with 3 ranks and with 8.

    A block of 4 MiB is large compared with whole pages. Pieces are quarters of a block, so the memory is 1¼
    blocks, or 1½ if sent pieces are copied. A ring that keeps old pieces needs ¾ block more. Two ranks would
    not show this, because they receive nothing into memory that an earlier block has used. The lone rank runs
    last, when its worker has loaded everything.
    """
    cases = [_case(rng, P, 4, 4, D=131072) for P in (3, 8, 1)]
    runs = [case.run(subject) for case in cases]
    for case, run in zip(cases, runs, strict=True):
        compare_ranks(case, run.results)
    few, many, alone = (max(report.peak_bytes for report in run.memory) for run in runs)
    block = cases[0].block_bytes(0)
    text = f"4 tokens on every rank, a K/V block of {block:,} bytes in 4 pieces"
    if keeps_every_block((few, many), 8, block):
        raise MISTAKES["keeps_every_block"].failure(f"{text}: peak {few:,} bytes with P=3, {many:,} with P=8")
    if few > alone + 7 * block // 4:
        raise MISTAKES["keeps_old_pieces"].failure(
            f"{text}: peak {alone:,} bytes with P=1, {few:,} with P=3; {5 * block // 4:,} more are enough"
        )


HINTS = (
    "While a rank computes with one piece, which tensors does it need? Which of them does it need no longer when the "
    "same piece of the next block has arrived?",
    "Keep the block as a list of pieces. For each piece of each step but the last: work = ring.post(…) with the piece, "
    "compute with the piece through ring.compute, then put what work.wait() returns in its place in the list.",
    r"memory beyond the shard: $1 + \tfrac1n$ blocks instead of 2; time per piece "
    r"$\max(t_\mathrm{compute}, t_\mathrm{hop}) / n$, as both are proportional to the piece",
)

STAGE = Stage(
    id="06.overlap",
    function="overlapped_ring",
    title="Hidden hops in less memory",
    kind="ring",
    helpers=("attend",),
    hints=HINTS,
    misconceptions=(*OVERLAP, *(MISTAKES[name] for name in SHARED)),
    checks=(
        Check("values", 2, "visible", "out and lse equal full attention for P = 1, 2, 3 and 8", _check_values),
        Check("order", 2, "visible", "for each piece: post, compute, wait", _check_order, kind="speed"),
        Check("traffic", 2, "visible", "one exchange a piece and hop, exactly the bytes of K and V", _check_traffic, kind="cost"),
        Check("eight_ranks", 2, "stress", "eight ranks, several heads, every hop hidden", _check_eight_ranks, kind="speed"),
        Check("any_network", 1, "stress", "the same answers where links, ranks or posts are slow", _check_any_network),
        Check("memory", 2, "visible", "a block and a piece, whatever the number of ranks", _check_memory, kind="cost"),
    ),
)  # fmt: skip
