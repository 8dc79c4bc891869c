"""Common mistakes in a ring's makespan, each with a function that makes the same one, and the truth."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlab.course.contract import Misconception

Array = np.ndarray


def makespan(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    """Return the seconds until the last rank ends: the truth of this stage.

    A message from rank r to the next begins when both have posted the exchange, and takes hop_s[r];
    an exchange is over when what the rank sent has left and what it is due has arrived.
    """
    return _last(compute_s, hop_s, overlapped)


def _last(
    compute_s: Array,
    hop_s: Array,
    overlapped: bool,
    *,
    hops: int | None = None,
    arrives: Any = lambda messages: np.roll(messages, 1),
    last: Any = np.max,
    begins: Any = lambda posted: np.maximum(posted, np.roll(posted, -1)),
    own_send: bool = True,
) -> float:
    compute_s, hop_s = np.asarray(compute_s, float), np.asarray(hop_s, float)
    P = len(compute_s)
    ready = np.zeros(P)
    for step in range(P):
        done = ready + compute_s[:, step]
        if step == (P - 1 if hops is None else hops):
            return float(last(done))
        messages = begins(ready if overlapped else done) + hop_s
        ready = np.maximum(done, arrives(messages))
        if own_send:
            ready = np.maximum(ready, messages)
    return float(last(ready))


def _p_hops(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    """The ring that sends the last block home as well; what overlaps is hidden in the last step too."""
    return _last(compute_s, hop_s, overlapped, hops=len(compute_s))


def _never_overlaps(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    return makespan(compute_s, hop_s, False)


def _always_overlaps(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    return makespan(compute_s, hop_s, True)


def _first_step_late(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    """Hides a step's hop behind the NEXT step's computation, so the first hop is paid in full."""
    if not overlapped or len(compute_s) == 1:
        return makespan(compute_s, hop_s, overlapped)
    return float(np.max(hop_s)) + makespan(compute_s, hop_s, True)


def _no_waiting(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    """The largest sum of a rank's computations: messages cost nothing, and nobody waits."""
    return float(np.sum(compute_s, axis=1).max())


def _closed_form(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    """The uniform ring's formula with the longest block and the longest hop of all."""
    P, block, hop = len(compute_s), float(np.max(compute_s)), float(np.max(hop_s))
    return (P - 1) * (max(block, hop) if overlapped else block + hop) + block


def _hops_are_free(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    return makespan(compute_s, np.zeros(len(compute_s)) if overlapped else hop_s, overlapped)


def _all_behind_all(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    if not overlapped:
        return makespan(compute_s, hop_s, False)
    return float(max(np.sum(compute_s, axis=1).max(), (len(compute_s) - 1) * np.max(hop_s)))


def _sums_over_ranks(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    P = len(compute_s)
    moved = (P - 1) * np.asarray(hop_s, float)
    return float(np.sum(compute_s) + (0 if overlapped else moved.sum()))


def _slowest_alone(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    """The largest sum of one rank's own times."""
    hop = np.asarray(hop_s, float)[:, None]
    own = np.asarray(compute_s, float).copy()
    own[:, :-1] = np.maximum(own[:, :-1], hop) if overlapped else own[:, :-1] + hop
    return float(own.sum(axis=1).max())


def _barrier(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    """All ranks wait for the slowest after every step."""
    slowest, hop = np.max(compute_s, axis=0), float(np.max(hop_s))
    between = np.maximum(slowest[:-1], hop) if overlapped else slowest[:-1] + hop
    return float(between.sum() + slowest[-1])


def _mean_rank(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    mean = np.broadcast_to(np.mean(compute_s, axis=0), np.shape(compute_s))
    return makespan(mean, hop_s, overlapped)


def _from_the_right(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    """Takes for the arrival at r what r + 1 sends."""
    return _last(compute_s, hop_s, overlapped, arrives=lambda messages: np.roll(messages, -1))


def _own_link(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    """Takes hop_s[r] for the message that arrives at r."""
    hop = np.asarray(hop_s, float)

    def arrives(messages: Array) -> Array:
        return np.roll(messages - hop, 1) + hop

    return _last(compute_s, hop_s, overlapped, arrives=arrives)


def _mailbox(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    """Messages leave as soon as the sender has posted, ready or not at the other end."""
    return _last(compute_s, hop_s, overlapped, begins=lambda posted: posted, own_send=False)


def _sender_alone(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    """A message begins when its sender has posted; the sender waits until it has left."""
    return _last(compute_s, hop_s, overlapped, begins=lambda posted: posted)


def _own_send_only(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    """A rank waits until its own message has left, not for the one that it is due."""
    return _last(compute_s, hop_s, overlapped, arrives=lambda messages: messages)


def _rank_zero(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    return _last(compute_s, hop_s, overlapped, last=lambda ends: ends[0])


def _sender_is_free(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    """A rank waits for what arrives, never for its own send."""
    return _last(compute_s, hop_s, overlapped, own_send=False)


UNIFORM = (
    Misconception(
        "p_hops",
        "One hop too many: P blocks need P − 1 hops. Nobody waits for a message in the last step.",
        _p_hops,
    ),
    Misconception(
        "adds_instead_of_max",
        "With double buffering you added hop and computation. They run side by side: until the next step it takes the "
        "longer of the two.",
        _never_overlaps,
    ),
    Misconception(
        "always_overlaps",
        "Without double buffering nothing runs side by side: a rank computes, then it exchanges, and the times add up. "
        "You took the longer of the two.",
        _always_overlaps,
    ),
    Misconception(
        "hops_are_free",
        "Double buffering hides a hop only as far as there is computation to hide it behind. Where the hop is longer, the "
        "rest of it is exposed in every step.",
        _hops_are_free,
    ),
    Misconception(
        "no_waiting",
        "Your hops cost nothing, with one buffer or two: you only added up what a rank computes. With one buffer a step takes "
        "block and hop, double buffered the longer of the two.",
        _no_waiting,
    ),
    Misconception(
        "all_behind_all",
        "You compared all computation with all hops. They overlap step by step: the last block is computed when every hop is "
        "over, so with slow hops its time comes on top.",
        _all_behind_all,
    ),
    Misconception(
        "first_hop_exposed",
        "The first hop runs while the first block, your own, is computed; you waited for it before computing anything.",
        _first_step_late,
    ),
    Misconception(
        "sums_over_ranks",
        "You added up the ranks. They compute at the same time: the makespan is when the last one ends, not how long all of "
        "them are busy.",
        _sums_over_ranks,
    ),
)
UNEQUAL = (
    Misconception(
        "slowest_alone",
        "You took the rank with the largest sum of its own times. Nobody is alone: a rank with little to do waits for its "
        "neighbours, and one with much to do makes others late, who make others late.",
        _slowest_alone,
    ),
    Misconception(
        "barrier_every_step",
        "You let all ranks wait for the slowest one after every step. There is no barrier in a ring: a rank waits for its two "
        "neighbours only, and a delay needs steps to travel.",
        _barrier,
    ),
    Misconception(
        "mean_rank",
        "You took the ranks' mean work. Together they are as slow as the waiting makes them: the mean is what a balanced "
        "layout would reach.",
        _mean_rank,
    ),
    Misconception(
        "closed_form",
        "You put the longest block and the longest hop into the formula of a uniform ring. That is an upper bound: where ranks "
        "differ, a long step of one and a long step of another may pass at the same time.",
        _closed_form,
    ),
    Misconception(
        "rank_zero",
        "You returned the end of rank 0. The makespan is when the last rank has ended, whichever that is.",
        _rank_zero,
    ),
    Misconception(
        "mailbox",
        "You let messages leave as soon as the sender posts, and nobody waits for its own. A message begins when both its ends "
        "are posted, for the receiver's buffer must be there too; and an exchange is over when the own message has left.",
        _mailbox,
    ),
    Misconception(
        "sender_alone",
        "You let a message begin at its sender's post alone. The receiver must have posted too: until then there is no buffer "
        "to write into.",
        _sender_alone,
    ),
    Misconception(
        "own_send_only",
        "A rank here waits until what it sends has left, but not for what it is due. It computes the next step with the block "
        "that arrives: nothing begins before that is there.",
        _own_send_only,
    ),
    Misconception(
        "sender_is_free",
        "A rank here waits for what arrives, but not for what it sends. Its exchange is over when both are: only then may it "
        "write into the buffer that was sent.",
        _sender_is_free,
    ),
)
LINKS = (
    Misconception(
        "hears_from_the_next",
        "Blocks come from the previous rank, r − 1. You let them come from r + 1.",
        _from_the_right,
    ),
    Misconception(
        "own_link_both_ways",
        "hop_s[r] is the link from r to the next rank. What arrives at r came over the previous rank's link, hop_s[r − 1].",
        _own_link,
    ),
)
MISTAKES = (*UNIFORM, *UNEQUAL, *LINKS)
