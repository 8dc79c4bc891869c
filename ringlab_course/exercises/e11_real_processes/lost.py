"""Checks of 11.lost: a ring that, when a rank dies, keeps a partial result and names the ranks in it.

News of a death travels one rank per step, in both directions. Suppose the dead rank ended before its exchange
e, and another rank is m hops away from it in the shorter direction. Then this other rank first misses a block
in its exchange e + m − 1. So it has the blocks of e + m steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import compare_with, expect_tuple, has_nan, relative_error
from ringlab_course.checking.contract import Check, Misconception, Stage
from ringlab_course.checking.failures import Crashed, Failure, NotWritten
from ringlab_course.checking.faults import EXCHANGES_AFTER_A_DEATH, Ended, Faults
from ringlab_course.checking.growth import keeps_every_block
from ringlab_course.checking.numbers import State, attend, fold, rounding_bound
from ringlab_course.checking.overlap import MISTAKES as ANY_RINGS
from ringlab_course.checking.positions import Shards, expect_bytes, expect_neighbours, shards
from ringlab_course.checking.positions import reason as broke_off
from ringlab_course.checking.wrong_answers import mistakes_of

OWN = (
    "gives_up", "claims_the_missing", "hides_what_it_has", "merges_what_never_came", "throws_away", "drops_the_block_in_hand",
    "goes_on_after_the_death", "stops_with_the_first", "meets_at_a_barrier", "swallows_every_error", "swallows_a_mismatch",
    "swallows_a_timeout", "scales_the_part", "names_steps", "names_the_other_way", "another_order", "forgets_the_own_block",
)  # fmt: skip
OF_ANY_RING = (
    "forgets_last_block", "sends_own_block_again", "never_uses_the_visitor", "sends_p_times", "does_not_unpack",
    "keeps_every_block", "leaves_the_ring", "never_waits", "splits_the_exchange", "gathers_everything", "sends_too_many_bytes",
    "repeats_heads_on_the_wire",
)  # fmt: skip
"""Mistakes that are described in exercise 05."""


NAMES = ("out", "lse", "seen")


def _over(case: Shards, rank: int, origins: Sequence[int]) -> State:
    """Return attention of a rank's queries over the blocks of `origins`, which may be empty."""
    if not origins:
        return np.zeros(case.qs[rank].shape), np.full(case.qs[rank].shape[:-1], -np.inf)
    return fold(attend(case.qs[rank], case.ks[origin], case.vs[origin]) for origin in origins)


def _run(subject: Any, case: Shards, faults: Faults | None = None) -> Any:
    try:
        return subject.run_ring(case.world_size, case.qs, case.ks, case.vs, faults=faults)
    except Crashed as crash:
        name = broke_off(crash, ragged=False, causal=False)
        if name is None:
            raise
        raise STAGE.misconception(name).failure(f"{case.text}\n{crash.counterexample}") from None


def _read(answer: Any, rank: int, P: int, text: str) -> tuple[Any, list[int]]:
    """Return (out, lse) and the ranks in `seen`. Raises: Failure if `seen` is not a list of ranks."""
    *parts, seen = expect_tuple(answer, NAMES)
    if not isinstance(seen, (list, tuple)):
        raise Failure(
            f"seen: a list of ranks is wanted, and this is of type {type(seen).__name__}.",
            f"{text}: rank {rank}",
        )
    try:
        ranks = [int(one) for one in seen]
    except (TypeError, ValueError, RuntimeError):
        raise Failure("seen: an entry of the list is not a rank.", f"{text}: rank {rank}") from None
    if any(not 0 <= one < P for one in ranks):
        raise Failure(f"seen: ranks go from 0 to {P - 1}.", f"{text}: rank {rank} has seen {ranks}")
    return tuple(parts), ranks


def _expect(case: Shards, rank: int, answer: Any, count: int, text: str) -> list[int]:
    """Return the ranks that the answer names. Raises: Failure unless they own the first `count` blocks."""
    P = case.world_size
    parts, seen = _read(answer, rank, P, text)
    order = [(rank - step) % P for step in range(P)]
    example = f"{text}: rank {rank} returned seen={seen}, it held the blocks of {order[:count]}"
    if has_nan(*parts):
        raise STAGE.misconception("merges_what_never_came").failure(example)
    inside = _inside(case, rank, parts)
    if inside is None:
        _expect_values(case, rank, parts, order[:count], example)
    if seen != order[: len(inside or ())]:
        raise _misnamed(case, rank, seen, order, len(inside or ())).failure(example)
    if len(seen) < count:
        name = "throws_away" if len(seen) == 1 < count - 1 else "drops_the_block_in_hand"
        name = "forgets_last_block" if count == P and not _dead(text) else name
        raise STAGE.misconception(name).failure(example)
    return seen


def _dead(text: str) -> bool:
    return " dies " in text


def _inside(case: Shards, rank: int, parts: Any) -> list[int] | None:
    """Return the owners of the blocks that (out, lse) covers; None if these are not the blocks of the first steps."""
    order = [(rank - step) % case.world_size for step in range(case.world_size)]
    for count in range(case.world_size + 1):
        right = _over(case, rank, order[:count])
        if _near(case, rank, parts, right):
            return order[:count]
    return None


def _near(case: Shards, rank: int, parts: Any, right: State) -> bool:
    keys, values = torch.cat(case.ks, dim=-2), torch.cat(case.vs, dim=-2)
    return relative_error(parts, right) <= rounding_bound(case.qs[rank], keys, values, right)


def _expect_values(case: Shards, rank: int, parts: Any, held: Sequence[int], example: str) -> None:
    """Raise Failure for an (out, lse) that is not attention over the blocks of a ring's first steps."""
    if any(
        _near(case, rank, parts, _over(case, rank, [*held, *[held[-1]] * more]))
        for more in range(1, case.world_size - len(held) + 1)
    ):
        raise STAGE.misconception("goes_on_after_the_death").failure(example)
    right = _over(case, rank, held)
    scaled = right[0] * case.world_size / len(held), right[1]
    if len(held) < case.world_size and _near(case, rank, parts, scaled):
        raise STAGE.misconception("scales_the_part").failure(example)
    keys, values = torch.cat(case.ks, dim=-2), torch.cat(case.vs, dim=-2)
    bound = rounding_bound(case.qs[rank], keys, values, right)
    compare_with(parts, right, bound=bound, names=NAMES[:2], case=example)


def _misnamed(case: Shards, rank: int, seen: list[int], order: list[int], count: int) -> Misconception:
    """Return the mistake in `seen`, for a result that covers the first `count` blocks of `order`."""
    P = case.world_size
    if seen == list(range(count)) and (count == P or sorted(seen) != sorted(order[:count])):
        return STAGE.misconception("names_steps")
    if seen == [(rank + step) % P for step in range(count)]:
        return STAGE.misconception("names_the_other_way")
    if sorted(seen) == sorted(order[:count]):
        return STAGE.misconception("another_order")
    if seen and seen == order[1:count]:
        return STAGE.misconception("forgets_the_own_block")
    missing = set(seen) - set(order[:count])
    return STAGE.misconception("claims_the_missing" if missing else "hides_what_it_has")


def _check_nobody_dies(subject: Any, rng: np.random.Generator) -> None:
    for P, L in ((3, 1), (1, 2), (2, 2), (4, 2)):
        case = shards(rng, [L] * P, 1, 1, 2)
        results = _run(subject, case).results
        for rank in reversed(range(P)):  # on rank 0 some mistakes in naming look alike, so rank 0 is last
            _expect(case, rank, results[rank], P, case.text)


def _killed(subject: Any, case: Shards, dead: int, exchange: int) -> None:
    """Raise Failure unless survivors return all that they held when `dead` ended before step `exchange`."""
    P = case.world_size
    # the number of exchanges that the answer makes in each step
    each = max(1, _run(subject, case).trace.rounds(dead) // (P - 1))
    results = _run(subject, case, Faults(kill=(dead, each * exchange), final=True)).results
    text = f"{case.text}: rank {dead} dies before its exchange {exchange}"
    if not isinstance(results[dead], Ended) or results[dead] != Ended("Killed"):
        raise Failure("A rank makes fewer exchanges than there are blocks to fetch.", text)
    counts: dict[int, int] = {}
    for rank in (rank for rank in reversed(range(P)) if rank != dead):
        answer = results[rank]
        counts[rank] = min(exchange + min((rank - dead) % P, (dead - rank) % P), P)
        if isinstance(answer, Ended):
            lost = (
                "meets_at_a_barrier"
                if "control:" in answer.text or "all_gather" in answer.text
                else "gives_up"
            )
            if EXCHANGES_AFTER_A_DEATH in answer.text:
                raise STAGE.misconception("goes_on_after_the_death").failure(
                    f"{text}, rank {rank}\n{answer.text}"
                )
            if answer.error != "PeerDiedError":
                raise Failure(f"A survivor ended with {answer.error}.", f"{text}, rank {rank}\n{answer.text}")
            raise STAGE.misconception(lost).failure(f"{text}, rank {rank} ended with it\n{answer.text}")
    _expect_own_steps(results, counts, P, text)
    for rank, count in counts.items():
        _expect(case, rank, results[rank], count, text)


def _expect_own_steps(results: Sequence[Any], counts: dict[int, int], P: int, text: str) -> None:
    """Raise Failure if all survivors stopped in the same step, although some could go on."""
    seen = {rank: _read(results[rank], rank, P, text)[1] for rank in counts}
    lengths = {len(ranks) for ranks in seen.values()}
    if len(set(counts.values())) > 1 and len(lengths) == 1 and 1 < min(lengths) < max(counts.values()):
        far = max(counts, key=lambda rank: counts[rank])
        raise STAGE.misconception("stops_with_the_first").failure(
            f"{text}: every rank returned {min(lengths)} blocks, rank {far} held {counts[far]}"
        )


def _check_killed(subject: Any, rng: np.random.Generator) -> None:
    for P, dead, exchange in ((2, 1, 0), (4, 2, 2), (4, 1, 0), (3, 0, 1)):
        _killed(subject, shards(rng, [2] * P, 1, 1, 2), dead, exchange)


def _check_far_away(subject: Any, rng: np.random.Generator) -> None:
    for dead, exchange in ((6, 2), (0, 5), (3, 0)):
        _killed(subject, shards(rng, [2] * 8, 2, 1, 4), dead, exchange)


def _check_other_errors(subject: Any, rng: np.random.Generator) -> None:
    """Check that errors of other kinds pass through: bugs in a computation and an exchange, and a timeout."""
    case = shards(rng, [2] * 3, 1, 1, 4)
    results = _run(subject, case).results
    for rank in reversed(range(3)):
        _expect(case, rank, results[rank], 3, case.text)
    narrow = [q[..., :3].clone() if rank == 1 else q for rank, q in enumerate(case.qs)]
    longer = [
        [torch.cat([x, x[..., :1, :]], dim=-2) if rank == 1 else x for rank, x in enumerate(xs)]
        for xs in (case.ks, case.vs)
    ]
    bad_q = replace(case, qs=narrow, text=f"{case.text}: on rank 1 q has head dim 3 and k has 4")
    bad_k = replace(
        case, ks=longer[0], vs=longer[1], text=f"{case.text}: on rank 1 k and v have a token more"
    )
    late = shards(rng, [2] * 3, 1, 1, 4, text=": the first exchange of rank 1 times out")
    for name, given, faults, error in (
        ("swallows_every_error", bad_q, None, ""),
        ("swallows_a_mismatch", bad_k, None, "MismatchError"),
        ("swallows_a_timeout", late, Faults(timeout=(1, 0)), "TransportTimeout"),
    ):
        try:
            results = subject.run_ring(3, given.qs, given.ks, given.vs, faults=faults).results
        except NotWritten:
            raise
        except Crashed as crash:
            if "cannot finish" not in crash.message or (error and error in crash.message):
                continue  # an error was raised, as it should be
        else:
            if given is bad_k and _all_whole(given, results):
                continue  # it exchanges lengths first, so no error arises
        raise STAGE.misconception(name).failure(f"{given.text}, and a rank returned all the same")


def _all_whole(case: Shards, results: Sequence[Any]) -> bool:
    """Return whether every rank returned attention over all blocks."""
    answers = [_read(answer, rank, case.world_size, case.text)[0] for rank, answer in enumerate(results)]
    return all(len(_inside(case, rank, parts) or ()) == case.world_size for rank, parts in enumerate(answers))


def _check_traffic(subject: Any, rng: np.random.Generator) -> None:
    for P, H, K in ((1, 1, 1), (3, 4, 2), (4, 1, 1)):
        case = shards(rng, [3] * P, H, K, 4)
        outcome = _run(subject, case)
        for rank in reversed(range(P)):
            _expect(case, rank, outcome.results[rank], P, case.text)
        expect_neighbours(outcome.trace, case.text)
        expect_bytes(case, outcome.trace, H // K)


def _check_memory(subject: Any, rng: np.random.Generator) -> None:
    """Check that a rank's peak memory grows by at most one block, 2 MiB, from 3 to 10 ranks."""
    peaks = []
    for P in (3, 10):
        case = shards(rng, [4] * P, 1, 1, 65536)
        outcome = _run(subject, case)
        for rank in reversed(range(P)):
            parts, seen = _read(outcome.results[rank], rank, P, case.text)
            order = [(rank - step) % P for step in range(P)]
            if seen != order or not _near(case, rank, parts, _over(case, rank, order)):
                _expect(case, rank, outcome.results[rank], P, case.text)
        peaks.append(max(report.peak_bytes for report in outcome.memory))
    if keeps_every_block(peaks, 10, case.block_bytes(0)):
        raise STAGE.misconception("keeps_every_block").failure(
            f"4 tokens on every rank, a K/V block of {case.block_bytes(0):,} bytes: "
            f"peak {peaks[0]:,} bytes with P=3, {peaks[1]:,} with P=10"
        )


HINTS = (
    "When an exchange fails, which blocks are in your (out, lse)? Which block do you hold that is not in it yet?",
    "In each step first attend to the block that is here and append ring.origin(step) to seen; only then shift, inside a try with "
    "`except PeerDiedError: break`, and nothing else inside it. Return the same three things in either case.",
    r"$\mathrm{seen} = [r, r-1, \dots, r-t] \bmod P$ with the first failing exchange $t$, and "
    r"$(o, L) = \bigoplus_{s \in \mathrm{seen}} \mathrm{attend}(q, k_s, v_s)$",
)

STAGE = Stage(
    id="11.lost",
    function="ring_with_losses",
    title="A rank dies: keep what is here, and say what it is",
    kind="ring",
    helpers=("nothing_seen", "attend"),
    hints=HINTS,
    misconceptions=(*map(mistakes_of("11.lost"), OWN), *(ANY_RINGS[name] for name in OF_ANY_RING)),
    checks=(
        Check("nobody_dies", 2, "visible", "all blocks are in, and named in their order", _check_nobody_dies),
        Check("killed", 3, "visible", "a rank dies: the others return what they held", _check_killed),
        Check(
            "far_away", 1, "stress", "eight ranks: those far from the dead one go on longer", _check_far_away
        ),
        Check("other_errors", 2, "visible", "errors that are nobody's death go through", _check_other_errors),
        Check(
            "traffic",
            1,
            "held-out",
            "P − 1 exchanges with the next rank, exactly the bytes of K and V",
            _check_traffic,
            kind="cost",
        ),
        Check(
            "memory", 1, "held-out", "two blocks, whatever the number of ranks", _check_memory, kind="cost"
        ),
    ),
)
