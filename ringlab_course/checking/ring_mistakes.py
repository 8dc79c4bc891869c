"""The common mistakes in the forward and the causal ring.

For the causal mistakes there are functions that imitate them, which exercise 07 uses. Imitations take (rank:
int, qs: Shards, ks: Shards, vs: Shards, positions: Positions), that is, the shards of all ranks and the
global positions of their tokens (None without a mask). They compute in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ringlab import oracle
from ringlab_course.checking.numbers import State, attend, fold
from ringlab_course.checking.positions import truth
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of

__all__ = ["CAUSAL", "FORWARD", "global_mask", "truth"]

mistake = mistakes_of("05")
FORWARD = misconceptions_of("05.forward")

Shards = Sequence[Any]
Positions = Any
"""One array per rank, None without a mask."""
See = Callable[[int, int, Positions], np.ndarray]


def global_mask(rank: int, origin: int, positions: Positions) -> np.ndarray | None:
    """Return a mask: True where the key's position is at or before the query's. None without positions."""
    return None if positions is None else _causal(rank, origin, positions)


def _causal(rank: int, origin: int, positions: Positions) -> np.ndarray:
    return np.asarray(positions[rank])[:, None] >= np.asarray(positions[origin])[None, :]


def _over(
    rank: int,
    qs: Shards,
    ks: Shards,
    vs: Shards,
    origins: Iterable[int],
    mask: Callable[[int], Any] = lambda origin: None,
) -> State:
    parts = [attend(qs[rank], ks[o], vs[o], mask(o)) for o in origins]
    q = oracle.float64(qs[rank])
    return fold(parts) if parts else (np.zeros(q.shape), np.full(q.shape[:-1], -np.inf))


def _order(rank: int, world_size: int) -> list[int]:
    return [(rank - step) % world_size for step in range(world_size)]


def _three_causal_steps(rank: int, qs: Shards, ks: Shards, vs: Shards, positions: Positions) -> State:
    order = _order(rank, len(ks))[:3]
    return _over(rank, qs, ks, vs, order, lambda origin: global_mask(rank, origin, positions))


def _seen(see: See) -> Callable[..., State]:
    """Return an imitation whose mask is `see(rank, origin, positions)`."""

    def imitate(rank: int, qs: Shards, ks: Shards, vs: Shards, positions: Positions) -> State:
        order = _order(rank, len(ks))
        return _over(rank, qs, ks, vs, order, lambda origin: see(rank, origin, positions))

    return imitate


def _shape(rank: int, origin: int, positions: Positions) -> tuple[int, int]:
    return len(positions[rank]), len(positions[origin])


def _everything(rank: int, origin: int, positions: Positions) -> np.ndarray:
    return np.ones(_shape(rank, origin, positions), dtype=bool)


def _local(rank: int, origin: int, positions: Positions) -> np.ndarray:
    return np.tril(_everything(rank, origin, positions))


def _own_only(rank: int, origin: int, positions: Positions) -> np.ndarray:
    return (_local if rank == origin else _everything)(rank, origin, positions)


def _by_rank(rank: int, origin: int, positions: Positions) -> np.ndarray:
    return (
        _local(rank, origin, positions)
        if rank == origin
        else np.full(_shape(rank, origin, positions), origin < rank)
    )


def _strict(rank: int, origin: int, positions: Positions) -> np.ndarray:
    return np.asarray(positions[rank])[:, None] > np.asarray(positions[origin])[None, :]


def _upper(rank: int, origin: int, positions: Positions) -> np.ndarray:
    return np.asarray(positions[rank])[:, None] <= np.asarray(positions[origin])[None, :]


def _plus_step(rank: int, origin: int, positions: Positions) -> np.ndarray:
    step = (rank - origin) % len(positions)
    return _causal(rank, (rank + step) % len(positions), positions)


CAUSAL = (
    mistake("no_mask", _seen(_everything)),
    mistake("local_mask", _seen(_local)),
    mistake("masks_own_block_only", _seen(_own_only)),
    mistake("assumes_contiguous", _seen(_by_rank)),
    mistake("strictly_before", _seen(_strict)),
    mistake("sees_the_future", _seen(_upper)),
    mistake("origin_plus_step", _seen(_plus_step)),
    mistake("looks_at_three_blocks", _three_causal_steps),
    mistake("nan_in_blind_blocks"),
    mistake("skips_the_shift"),
    mistake("assumes_equal_lengths"),
    mistake("pads_the_blocks"),
)
