"""Common mistakes of the backward ring: masks and windows, the target of each sum, the end of a courier's way.

Imitations take (rank, problem) and return (dq, dk, dv) in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ringlab import oracle
from ringlab_course.checking.backward import Gradients, Parts, Problem, parts_of, sum_over
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("09.couriers")

Keep = Callable[[int, int, int], bool]
"""keep(contributor, owner, P): whether that part reaches the sum."""


def _assembled(
    rank: int,
    problem: Problem,
    parts: Parts,
    dq: Keep = lambda c, o, P: True,
    dkv: Keep = lambda c, o, P: True,
    home: int = 0,
) -> Gradients:
    """Sums of parts; dk and dv are those of the block of rank + home."""
    P = problem.world_size
    owner = (rank + home) % P
    own = [parts[rank][o] for o in range(P) if dq(rank, o, P)]
    given = [parts[c][owner] for c in range(P) if dkv(c, owner, P)]
    k, v = problem.ks[owner], problem.vs[owner]
    return sum_over(own, 0, problem.qs[rank]), sum_over(given, 1, k), sum_over(given, 2, v)


def _which(**how: Any) -> Callable[..., Gradients]:
    """An imitation that puts the right parts together in a wrong way."""
    return lambda rank, problem: _assembled(rank, problem, problem.parts, **how)


def _sees(see: Callable[[Problem, int, int], np.ndarray]) -> Callable[..., Gradients]:
    """An imitation that masks by see(problem, rank, owner)."""

    def imitate(rank: int, problem: Problem) -> Gradients:
        return _assembled(rank, problem, parts_of(problem, see=lambda r, o: see(problem, r, o)))

    return imitate


def _holds(here: Callable[[int, int, int], int]) -> Callable[..., Gradients]:
    """An imitation in which K/V of rank here(rank, owner, P) lie where the owner's should."""

    def imitate(rank: int, problem: Problem) -> Gradients:
        if len(set(problem.lengths)) > 1:
            raise ValueError("blocks of other lengths, and this mistake breaks off")
        P = problem.world_size
        return _assembled(rank, problem, parts_of(problem, here=lambda r, o: here(r, o, P)))

    return imitate


def _shape(problem: Problem, rank: int, owner: int) -> tuple[int, int]:
    return problem.lengths[rank], problem.lengths[owner]


def _distance(problem: Problem, rank: int, owner: int) -> np.ndarray:
    return problem.positions[rank].numpy()[:, None] - problem.positions[owner].numpy()[None, :]


def _width(problem: Problem) -> int:
    return sum(problem.lengths) if problem.window is None else problem.window


def _by_rank(problem: Problem, rank: int, owner: int) -> np.ndarray:
    shape = _shape(problem, rank, owner)
    before = np.tri(*shape, dtype=bool) if rank == owner else np.full(shape, owner < rank)
    return before & (_distance(problem, rank, owner) < _width(problem))


def _by_index(problem: Problem, rank: int, owner: int) -> np.ndarray:
    rows, keys = _shape(problem, rank, owner)
    distance = np.arange(rows)[:, None] - np.arange(keys)[None, :]
    return (distance >= 0) & (distance < _width(problem))


def _plus_step(problem: Problem, rank: int, owner: int) -> np.ndarray:
    return problem.mask(rank, (2 * rank - owner) % problem.world_size)


def _strictly(problem: Problem, rank: int, owner: int) -> np.ndarray:
    return problem.mask(rank, owner) & (_distance(problem, rank, owner) > 0)


def _wide(more: float) -> Callable[..., Gradients]:
    """An imitation whose window is wider by `more`."""

    def see(problem: Problem, rank: int, owner: int) -> np.ndarray:
        distance = _distance(problem, rank, owner)
        return (distance >= 0) & (distance < _width(problem) + more)

    return _sees(see)


def _window_alone(problem: Problem, rank: int, owner: int) -> np.ndarray:
    if problem.window is None:
        raise ValueError("without a window this is no mask at all")
    return _distance(problem, rank, owner) < _width(problem)


def _window_by_index(problem: Problem, rank: int, owner: int) -> np.ndarray:
    rows, keys = _shape(problem, rank, owner)
    distance = np.arange(rows)[:, None] - np.arange(keys)[None, :]
    return (_distance(problem, rank, owner) >= 0) & (distance < _width(problem))


def _own_sums(rank: int, problem: Problem) -> Gradients:
    """dk and dv never travel: each rank adds up what it computes, whoever's block it is."""
    own = problem.parts[rank]
    return tuple(sum_over(own, n, x[rank]) for n, x in enumerate((problem.qs, problem.ks, problem.vs)))  # type: ignore[return-value]


def _other_way(rank: int, problem: Problem) -> Gradients:
    """Couriers go to the previous rank while blocks go to the next."""
    P, parts = problem.world_size, problem.parts
    met = [parts[(rank - t) % P][(rank - 2 * t) % P] for t in range(P)]
    k, v = problem.ks[rank], problem.vs[rank]
    return sum_over(parts[rank], 0, problem.qs[rank]), sum_over(met, 1, k), sum_over(met, 2, v)


def _added_to_what_was_sent(rank: int, problem: Problem) -> Gradients:
    """The arriving sum is added to the sum that was sent away, which therefore counts again in every step."""
    P, sums = (
        problem.world_size,
        [[np.zeros(tuple(x.shape)) for x in xs] for xs in zip(problem.ks, problem.vs, strict=True)],
    )
    for step in range(P):
        sums = [
            [x + y for x, y in zip(sums[r], problem.parts[r][(r - step) % P][1:], strict=True)]
            for r in range(P)
        ]
        sums = [[x + y for x, y in zip(sums[r], sums[r - 1], strict=True)] for r in range(P)]
    dq, dk, dv = _assembled(rank, problem, problem.parts)
    return (dq, sums[rank][0], sums[rank][1]) if P > 1 else (dq, dk, dv)


def _mean(rank: int, problem: Problem) -> Gradients:
    dq, dk, dv = _assembled(rank, problem, problem.parts)
    return dq, dk / problem.world_size, dv / problem.world_size


def _swapped(rank: int, problem: Problem) -> Gradients:
    dq, dk, dv = _assembled(rank, problem, problem.parts)
    return dq, dv, dk


def _scaled_again(rank: int, problem: Problem) -> Gradients:
    dq, dk, dv = _assembled(rank, problem, problem.parts)
    return dq * problem.qs[rank].shape[-1] ** -0.5, dk, dv


def _block_lse(rank: int, problem: Problem) -> Gradients:
    """Every pair normalised by itself."""

    def own(r: int, o: int) -> np.ndarray:
        return oracle.attention(problem.qs[r], problem.ks[o], problem.vs[o], mask=problem.mask(r, o)).lse

    return _assembled(rank, problem, parts_of(problem, lse=own))


def _no_delta(rank: int, problem: Problem) -> Gradients:
    return _assembled(rank, problem, parts_of(problem, delta=0.0))


def _rounded_on_the_way(rank: int, problem: Problem) -> Gradients:
    """Every hop rounds the courier to bfloat16."""
    dq, dk, dv = _assembled(rank, problem, problem.parts)
    if (P := problem.world_size) == 1:
        return dq, dk, dv
    dk, dv = np.zeros(dk.shape), np.zeros(dv.shape)
    for step in range(P):
        _, more_k, more_v = problem.parts[(rank + step) % P][rank]
        dk, dv = _bfloat16(dk + more_k), _bfloat16(dv + more_v)
    return dq, dk, dv


def _bfloat16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().double().numpy()


SUMS = (
    mistake("goes_the_other_way", _other_way),
    mistake("ends_at_the_neighbour", _which(home=1)),
    mistake("one_hop_too_far", _which(home=-1)),
    mistake("gradients_stay", _own_sums),
    mistake("owner_alone", _which(dkv=lambda c, o, P: c == o)),
    mistake("last_rank_alone", _which(dkv=lambda c, o, P: c == (o - 1) % P)),
    mistake("drops_own_block", _which(dq=lambda c, o, P: c != o, dkv=lambda c, o, P: c != o)),
    mistake("couriers_start_empty", _which(dkv=lambda c, o, P: c != o)),
    mistake(
        "drops_last_block",
        _which(dq=lambda c, o, P: P == 1 or o != (c + 1) % P, dkv=lambda c, o, P: P == 1 or o != (c + 1) % P),
    ),
    mistake(
        "counts_to_three", _which(dq=lambda c, o, P: (c - o) % P < 3, dkv=lambda c, o, P: (c - o) % P < 3)
    ),
    mistake("dq_of_the_last_block", _which(dq=lambda c, o, P: o == (c + 1) % P)),
    mistake("counts_what_was_sent", _added_to_what_was_sent),
    mistake("averages_the_ranks", _mean),
    mistake("swaps_dk_and_dv", _swapped),
    mistake("scales_dq_again", _scaled_again),
    mistake("lse_of_the_block", _block_lse),
    mistake("no_delta", _no_delta),
    mistake("narrow_couriers", _rounded_on_the_way),
)

SEEN = (
    mistake("no_mask", _sees(lambda p, r, o: np.ones(_shape(p, r, o), dtype=bool))),
    mistake("local_mask", _sees(_by_index)),
    mistake("assumes_contiguous", _sees(_by_rank)),
    mistake("strictly_before", _sees(_strictly)),
    mistake("sees_the_future", _sees(lambda p, r, o: p.mask(o, r).T)),
    mistake("origin_plus_step", _sees(_plus_step)),
    mistake("never_uses_the_visitor", _holds(lambda r, o, P: r)),
    mistake("sends_own_block_again", _holds(lambda r, o, P: r if o == r else (r - 1) % P)),
)

COMPARED = (*SUMS, *SEEN)
"""Those that show in values."""

WINDOWS = (
    mistake("no_window", _wide(np.inf)),
    mistake("window_too_wide", _wide(1)),
    mistake("window_too_narrow", _wide(-1)),
    mistake("only_the_window", _sees(_window_alone)),
    mistake("window_by_index", _sees(_window_by_index)),
)
"""Those that show in values where queries see a window."""
