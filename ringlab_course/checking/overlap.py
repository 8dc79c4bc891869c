"""Check that a ring computes while its exchanges are under way, from the order of each rank's events."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of

mistake = mistakes_of("06.overlap")

OVERLAP = (
    mistake("posts_after_computing"),
    mistake("waits_before_computing"),
    mistake("all_pieces_at_once"),
    mistake("overlaps_some_steps"),
    mistake("computes_unseen"),
    mistake("cuts_the_computation"),
    mistake("one_buffer"),
    mistake("writes_what_is_sent"),
    mistake("wrong_direction"),
    mistake("widens_before_sending"),
    mistake("reads_before_waiting"),
    mistake("looks_at_the_clock"),
    mistake("fewer_pieces"),
    mistake("splits_the_exchange"),
    mistake("keeps_old_pieces"),
)
MISTAKES = {each.name: each for each in (*misconceptions_of("05.forward"), *OVERLAP)}


def order(trace: Any, rank: int) -> list[str]:
    """Return the events of `rank` in order: "post", "compute" and "wait".

    Consecutive posts count as one, and so do consecutive waits. Computations that take no time are left out.
    Of events at the same time, a wait comes before a post and a computation comes last. A wait at the time of
    its own post comes after that post.
    """
    done = [(e.start, 3, e.start, "compute") for e in trace.computes(rank) if e.end > e.start]
    for exchange in trace.exchanges(rank):
        done += [(exchange.posted, 2, exchange.index, "post"), (exchange.waited, 1, exchange.index, "wait")]
        if exchange.waited == exchange.posted:  # so that the wait is sorted after its post
            done[-1] = (exchange.waited, 2, exchange.index + 0.5, "wait")
    names = [name for *_, name in sorted(done)]
    return [name for name, same in itertools.groupby(names) for _ in (same if name == "compute" else [0])]


def expect_overlap(trace: Any, text: str, pieces: int = 1) -> None:
    """Raise a Failure if a rank does not compute during its exchange; a block has `pieces` parts."""
    P = trace.world_size
    hops = pieces * (P - 1)
    right = ["post", "compute", "wait"] * hops + ["compute"] * pieces
    for rank in range(P):
        seen = order(trace, rank)
        if seen == right:
            continue
        example = f"{text}: rank {rank} did {', '.join(seen)}; should do {', '.join(right)}"
        name = _misplaced(seen, P, pieces)
        if name in ("posts_after_computing", "waits_before_computing", "overlaps_some_steps"):
            end = max((event.end for event in trace.computes()), default=0.0)
            example += f"\non the virtual clock the ring ends after {end:g} s, {P * pieces} s are possible"
        if name is None:
            raise Failure("The exchange is not under way while the rank computes.", example)
        raise MISTAKES[name].failure(example)


def _misplaced(seen: Sequence[str], P: int, pieces: int) -> str | None:
    computes, hops, last = seen.count("compute"), pieces * (P - 1), ["compute"] * pieces
    if list(seen) == ["post", "compute", "wait"] * (pieces * P):
        return "sends_p_times"
    if computes != P * pieces:
        return "cuts_the_computation" if computes else "computes_unseen"
    if list(seen) == ["compute", "post", "wait"] * hops + last:
        return "posts_after_computing"
    if list(seen) == ["post", "wait", "compute"] * hops + last:
        return "waits_before_computing"
    if pieces > 1 and list(seen) == ["post", *last, "wait"] * (P - 1) + last:
        return "all_pieces_at_once"
    hidden = sum(seen[i : i + 3] == ["post", "compute", "wait"] for i in range(len(seen)))
    return "overlaps_some_steps" if 0 < hidden < hops else None
