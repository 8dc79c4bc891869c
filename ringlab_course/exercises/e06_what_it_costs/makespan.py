"""Checks of 06.makespan: when the last rank of a ring ends, with and without double buffering; its common mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ringlab_course.checking.contract import Check, Misconception, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.numbers import answered_number
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("06.makespan")


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


def _exchanged(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    return makespan(compute_s, hop_s, not overlapped)


def _transposed(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    return makespan(np.transpose(compute_s), hop_s, overlapped)


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


def _link_of_the_receiver(compute_s: Array, hop_s: Array, overlapped: bool) -> float:
    """Takes hop_s[r] for the message into r, by whichever rank it is sent."""
    return makespan(compute_s, np.roll(np.asarray(hop_s, float), -1), overlapped)


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
    mistake("p_hops", _p_hops),
    mistake("adds_instead_of_max", _never_overlaps),
    mistake("always_overlaps", _always_overlaps),
    mistake("buffers_exchanged", _exchanged),
    mistake("hops_are_free", _hops_are_free),
    mistake("no_waiting", _no_waiting),
    mistake("all_behind_all", _all_behind_all),
    mistake("first_hop_exposed", _first_step_late),
    mistake("sums_over_ranks", _sums_over_ranks),
)
UNEQUAL = (
    mistake("rows_are_steps", _transposed),
    mistake("slowest_alone", _slowest_alone),
    mistake("barrier_every_step", _barrier),
    mistake("mean_rank", _mean_rank),
    mistake("closed_form", _closed_form),
    mistake("rank_zero", _rank_zero),
    mistake("mailbox", _mailbox),
    mistake("own_send_only", _own_send_only),
)
LINKS = (  # the first two give the same times where links are alike
    mistake("sender_alone", _sender_alone),
    mistake("sender_is_free", _sender_is_free),
    mistake("hears_from_the_next", _from_the_right),
    mistake("own_link_both_ways", _own_link),
    mistake("link_of_the_receiver", _link_of_the_receiver),
)
MISTAKES = (*UNIFORM, *UNEQUAL, *LINKS)


Array = np.ndarray


def _compare(subject: Any, rings: Iterable[tuple[Any, Any]], text: str = "") -> None:
    """Compare all rings' makespans, each computing first and posting first; a mistake is named only if it fits them all."""
    compare_all(_cases(subject, rings, text), MISTAKES)


def _cases(subject: Any, rings: Iterable[tuple[Any, Any]], text: str) -> Iterator[Answered]:
    for compute_s, hop_s in rings:
        for overlapped in (False, True):
            inputs = (np.asarray(compute_s, float), np.asarray(hop_s, float), overlapped)
            how = "post, then compute" if overlapped else "compute, then shift"
            figures = text or f"compute_s {inputs[0].tolist()}, hop_s {inputs[1].tolist()}"
            answer, truth = subject.call(*inputs), makespan(*inputs)
            yield answered_number(answer, truth, inputs, f"{figures}, {how}", "s")


Ring = tuple[Array, Array]
"""compute_s and hop_s."""


def telling(draw: Callable[[], list[Ring]], mistakes: Sequence[Misconception]) -> list[Ring]:
    """Return rings on which each of `mistakes` answers something else than the truth and than every other mistake."""
    while True:
        rings = draw()
        asked = [(compute_s, hop_s, overlapped) for compute_s, hop_s in rings for overlapped in (False, True)]
        told = {m.name: [m.imitate(*each) for each in asked] for m in MISTAKES if m.imitate}
        told["the truth"] = [makespan(*each) for each in asked]
        if all(_differs(told, m.name) for m in mistakes):
            return rings


def _differs(told: dict[str, list[float]], name: str) -> bool:
    return not any(np.allclose(told[name], told[other], rtol=1e-4) for other in told if other != name)


def _check_uniform(subject: Any, rng: np.random.Generator) -> None:
    # With two ranks, and with them alone, a hop that is never hidden and a first one that is not look the same.
    def draw() -> list[Ring]:
        long, short = (rng.integers(*ends, 5).astype(float) for ends in ((50, 100), (1, 50)))
        sizes = (
            (1, long[0], short[0]),
            (3, long[1], short[1]),
            (3, short[2], long[2]),
            (2, long[3], short[3]),
            (3, long[4], 0.0),
        )
        return [(np.full((P, P), compute), np.full(P, hop)) for P, compute, hop in sizes]

    _compare(subject, telling(draw, UNIFORM))


def causal(P: int, seconds: float) -> Array:
    """Return (P, P) seconds of the contiguous causal ring: whole blocks, half of one's own, nothing of the future."""
    rank, step = np.indices((P, P))
    origin = (rank - step) % P
    return np.where(origin < rank, seconds, np.where(origin == rank, seconds / 2, 0.0))


def _check_unequal(subject: Any, rng: np.random.Generator) -> None:
    """Links are alike here, so that mistakes about links give the right times."""

    def draw() -> list[Ring]:
        works = [
            rng.integers(1, 20, (2, 2)),
            rng.integers(1, 20, (3, 3)),
            causal(4, 2.0 * rng.integers(5, 50)),
        ]
        return [(np.asarray(work, float), np.full(len(work), float(rng.integers(1, 9)))) for work in works]

    _compare(subject, telling(draw, UNEQUAL))


def _check_links(subject: Any, rng: np.random.Generator) -> None:
    """Three links of different speed; then two nodes."""

    def draw() -> list[Ring]:
        slow, fast = float(rng.integers(10, 50)), float(rng.integers(1, 10))
        nodes = (causal(4, 2.0 * rng.integers(5, 50)), np.array([fast, slow, fast, slow]))
        return [(rng.integers(1, 20, (3, 3)).astype(float), rng.integers(1, 20, 3).astype(float)), nodes]

    _compare(subject, telling(draw, (*UNEQUAL, *LINKS)))


def _check_random(subject: Any, rng: np.random.Generator) -> None:
    for P in (2, 5, 8, 13):
        work = rng.integers(0, 512, (P, P)) / 8
        hops = rng.integers(0, 512, P) / 8
        _compare(subject, [(work, hops)], f"P={P}, unequal work, unequal links")


HINTS = (
    "When can rank r begin its step 1? Name everything that must have happened by then.",
    "Keep one array with the time at which each rank is ready for its next step, and go step by step. The computation "
    "takes a rank from `ready` to `done`. It posts its exchange at `ready` or at `done`, depending on `overlapped`. The "
    "posts of r and r + 1 determine when their message is over. np.roll shifts an array by one rank.",
    r"$m_r = \max(p_r, p_{r+1}) + h_r$, $\;\mathrm{ready}_r \leftarrow \max(\mathrm{done}_r, m_r, m_{r-1})$, with $p$ = "
    r"ready (post, then compute) or done",
)

STAGE = Stage(
    id="06.makespan",
    function="makespan",
    title="When the last rank ends",
    hints=HINTS,
    misconceptions=MISTAKES,
    checks=(
        Check(
            "uniform",
            3,
            "visible",
            "all ranks alike, hops shorter and longer than the computation",
            _check_uniform,
        ),
        Check("unequal", 3, "visible", "ranks with different work, as under a causal mask", _check_unequal),
        Check("links", 2, "visible", "links of different speed, as between nodes", _check_links),
        Check("random", 2, "held-out", "many ranks, any work, any links", _check_random),
    ),
)
