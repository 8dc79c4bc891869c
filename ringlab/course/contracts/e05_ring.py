"""Checks of 05.forward, the ring without a mask; its shards and counts serve 05.causal too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ringlab.course.answers import compare_with, expect_array, expect_tuple, relative_error
from ringlab.course.contract import Check, Crashed, Failure, Misconception, Stage
from ringlab.course.contracts.e05_ring_mistakes import CAUSAL, FORWARD, truth
from ringlab.course.contracts.e05_step import NAMES, random, rounding_bound
from ringlab.course.faults import Ended, Faults

MISTAKES = {mistake.name: mistake for mistake in FORWARD}
CRASHES = {mistake.name: mistake for mistake in (*CAUSAL, *FORWARD)}


@dataclass(frozen=True)
class Shards:
    """The q, k and v of every rank, with the global positions of their tokens where there is a mask."""

    qs: list[torch.Tensor]
    ks: list[torch.Tensor]
    vs: list[torch.Tensor]
    text: str
    positions: list[torch.Tensor] | None = None
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return len(self.qs)

    def run(self, subject: Any, faults: Faults | None = None) -> Any:
        """The outcome of the learner's program on these shards; a known reason to break off gets its name."""
        keywords = {} if self.positions is None else {"positions": self.positions}
        try:
            return subject.run_ring(self.world_size, self.qs, self.ks, self.vs, faults=faults, **keywords)
        except Crashed as crash:
            name = reason(
                crash, ragged=len({q.shape[-2] for q in self.qs}) > 1, causal=self.positions is not None
            )
            if name is None:
                raise
            raise CRASHES[name].failure(f"{self.text}\n{crash.counterexample}") from None

    def block_bytes(self, origin: int) -> int:
        """The bytes of one K/V block: K and V, K/V heads only."""
        return self.ks[origin].nbytes + self.vs[origin].nbytes


def shards(
    rng: np.random.Generator,
    lengths: Sequence[int],
    H: int,
    K: int,
    D: int,
    *,
    size: float = 1.0,
    text: str = "",
    positions: list[torch.Tensor] | None = None,
) -> Shards:
    """Random float32 shards of these lengths."""
    qs = [random(rng, 1, H, L, D, size=size) for L in lengths]
    ks, vs = ([random(rng, 1, K, L, D) for L in lengths] for _ in range(2))
    heads = "" if H == K == 1 else f", {H} query and {K} K/V heads"
    tokens = (
        "one token per rank" if set(lengths) == {1} else f"{', '.join(map(str, lengths))} tokens on the ranks"
    )
    return Shards(qs, ks, vs, f"P={len(lengths)}, {tokens}, D={D}{heads}{text}", positions)


def narrow(case: Shards) -> Shards:
    """The same shards in bfloat16."""
    return Shards(
        *([x.bfloat16() for x in xs] for xs in (case.qs, case.ks, case.vs)), f"{case.text}, bfloat16"
    )


def reason(crash: Crashed, *, ragged: bool, causal: bool) -> str | None:
    """Return the name of the mistake that made the ranks break off, None where it is none that we know."""
    if re.search(r"'tuple' (object )?(has no|and )|and 'tuple'|not tuple|a tuple of", crash.counterexample):
        return "does_not_unpack"
    if "MismatchError" in crash.message:
        return "assumes_equal_lengths" if ragged else None
    if not any(name in crash.message for name in ("DeadlockError", "UnreceivedError", "PeerDiedError")):
        return None
    if "ended without it" not in crash.counterexample and "never waited" in crash.counterexample:
        return "never_waits"
    if causal:
        return "skips_the_shift"
    waits_in_a_circle = "cycle: " in crash.counterexample and "cycle: none" not in crash.counterexample
    return None if waits_in_a_circle else "leaves_the_ring"


def compare_ranks(case: Shards, results: Sequence[Any], misconceptions: Sequence[Misconception]) -> None:
    """Raise the Failure of the first rank whose (out, lse) are wrong."""
    shared = (case.qs, case.ks, case.vs, case.positions)
    keys, values = torch.cat(case.ks, dim=-2), torch.cat(case.vs, dim=-2)
    for rank, answer in enumerate(results):
        right = truth(rank, *shared)
        bound = rounding_bound(case.qs[rank], keys, values, right)
        compare_with(
            answer,
            right,
            bound=bound,
            misconceptions=misconceptions,
            inputs=(rank, *shared),
            names=NAMES,
            case=f"{case.text}: rank {rank}",
        )


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    for P, L, D in ((2, 1, 1), (2, 4, 4), (3, 1, 2), (3, 2, 2), (1, 2, 2)):
        case = shards(rng, [L] * P, 1, 1, D)
        compare_ranks(case, case.run(subject).results, FORWARD)


def _check_rounds(subject: Any, rng: np.random.Generator) -> None:
    for P in (1, 3, 8):  # with two ranks P and 2(P − 1) are the same, and everybody is a neighbour
        case = shards(rng, [2] * P, 1, 1, 2)
        expect_neighbours(case.run(subject).trace, case.text)


def expect_neighbours(trace: Any, text: str) -> None:
    """P − 1 exchanges on every rank, all of them with the next one."""
    P = trace.world_size
    for rank in range(P):
        if trace.peers(rank) - {(rank + 1) % P}:
            strangers = ", ".join(map(str, sorted(trace.peers(rank))))
            raise MISTAKES["gathers_everything"].failure(f"{text}: rank {rank} sends to ranks {strangers}")
        rounds = trace.rounds(rank)
        example = f"{text}: rank {rank} made {rounds} exchanges, should make {P - 1}"
        if rounds == P:
            raise MISTAKES["sends_p_times"].failure(example)
        if rounds == 2 * (P - 1) and rounds:
            raise MISTAKES["splits_the_exchange"].failure(example)
        if rounds != P - 1:
            raise Failure("The number of exchanges is not P − 1 on every rank.", example)


def _check_bytes(subject: Any, rng: np.random.Generator) -> None:
    for P, H, K in ((2, 1, 1), (3, 2, 1), (3, 4, 2)):
        case = shards(rng, [4] * P, H, K, 4)
        expect_bytes(case, case.run(subject).trace, H // K)
    case = narrow(shards(rng, [4] * 3, 1, 1, 4))
    expect_bytes(case, case.run(subject).trace)


def expect_bytes(case: Shards, trace: Any, group: int = 1) -> None:
    """Every rank sends each block but one exactly once, and nothing else."""
    P = case.world_size
    for rank in range(P):
        exact = sum(case.block_bytes((rank - step) % P) for step in range(P - 1))
        sent = trace.bytes_sent(rank)
        example = f"{case.text}: rank {rank} sent {sent:,} bytes, K and V take {exact:,}"
        if group > 1 and sent == group * exact:
            raise MISTAKES["repeats_heads_on_the_wire"].failure(example)
        if sent > exact:
            raise MISTAKES["sends_too_many_bytes"].failure(example)
        if sent < exact:
            raise Failure("Fewer bytes travel than K and V hold.", example)


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
        Check(
            "values",
            3,
            "visible",
            "out and lse equal full attention for P = 1, 2, 3",
            _check_values,
            (
                "averages_blocks",
                "forgets_last_block",
                "forgets_own_block",
                "never_uses_the_visitor",
                "sends_own_block_again",
                "shifts_keys_only",
                "does_not_unpack",
                "leaves_the_ring",
                "never_waits",
            ),
        ),
        Check(
            "rounds",
            1,
            "visible",
            "P − 1 exchanges, all with the next rank",
            _check_rounds,
            ("sends_p_times", "splits_the_exchange", "gathers_everything"),
            kind="cost",
        ),
        Check(
            "bytes",
            2,
            "visible",
            "exactly the bytes of K and V travel, in their dtype",
            _check_bytes,
            ("repeats_heads_on_the_wire", "sends_too_many_bytes"),
            kind="cost",
        ),
        Check(
            "eight_ranks", 2, "stress", "eight ranks, several heads", _check_eight_ranks, ("counts_to_three",)
        ),
        Check(
            "sloped",
            1,
            "stress",
            "large scores that grow along the sequence",
            _check_sloped,
            ("overflowing_ring",),
        ),
        Check(
            "bfloat16",
            1,
            "stress",
            "bfloat16 inputs, float32 in the state",
            _check_bfloat16,
            ("low_precision_ring",),
        ),
        Check(
            "memory",
            2,
            "held-out",
            "memory does not grow with the number of ranks",
            _check_memory,
            ("keeps_every_block",),
            kind="cost",
        ),
        Check(
            "killed",
            1,
            "held-out",
            "a rank dies: no other returns numbers in which its keys are missing",
            _check_killed,
            ("goes_on_without_the_dead",),
        ),
    ),
)
