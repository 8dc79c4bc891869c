"""Common mistakes in the forward and the causal ring, each with a function that makes the same one.

Imitations take (rank: int, qs: Shards, ks: Shards, vs: Shards, positions: Positions): the shards of all ranks, and the
global positions of their tokens, None without a mask. They compute in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ringlab import oracle
from ringlab_course.checking.numbers import State, attend, fold, merged
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("05")

Shards = Sequence[Any]
Positions = Any
"""One array per rank, None without a mask."""
See = Callable[[int, int, Positions], np.ndarray]


def global_mask(rank: int, origin: int, positions: Positions) -> np.ndarray | None:
    """Return True where the key's global position is at or before the query's; None without positions."""
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


def truth(rank: int, qs: Shards, ks: Shards, vs: Shards, positions: Positions = None) -> State:
    """Return what rank `rank` should return: its queries against all keys (that it may see)."""
    k, v = (np.concatenate([oracle.float64(x) for x in xs], axis=-2) for xs in (ks, vs))
    if positions is None:
        return attend(qs[rank], k, v)
    columns = [_causal(rank, origin, positions) for origin in range(len(ks))]
    return attend(qs[rank], k, v, np.concatenate(columns, axis=1))


def _mean_of_blocks(rank: int, qs: Shards, ks: Shards, vs: Shards, positions: Positions = None) -> State:
    parts = [attend(qs[rank], k, v) for k, v in zip(ks, vs, strict=True)]
    return np.mean([out for out, _ in parts], axis=0), fold(parts)[1]


def _own_block_always(rank: int, qs: Shards, ks: Shards, vs: Shards, positions: Positions = None) -> State:
    return _over(rank, qs, ks, vs, [rank] * len(ks))


def _sends_own(rank: int, qs: Shards, ks: Shards, vs: Shards, positions: Positions = None) -> State:
    return _over(rank, qs, ks, vs, [rank] + [(rank - 1) % len(ks)] * (len(ks) - 1))


def _forgets_last(rank: int, qs: Shards, ks: Shards, vs: Shards, positions: Positions = None) -> State:
    return _over(rank, qs, ks, vs, _order(rank, len(ks))[:-1])


def _forgets_first(rank: int, qs: Shards, ks: Shards, vs: Shards, positions: Positions = None) -> State:
    return _over(rank, qs, ks, vs, _order(rank, len(ks))[1:])


def _own_twice(rank: int, qs: Shards, ks: Shards, vs: Shards, positions: Positions = None) -> State:
    return _over(rank, qs, ks, vs, [rank, *_order(rank, len(ks))])


def _from_zero(rank: int, qs: Shards, ks: Shards, vs: Shards, positions: Positions = None) -> State:
    """Begins with a key of score 0 and value 0."""
    out, lse = truth(rank, qs, ks, vs)
    return merged((np.zeros_like(out), np.zeros_like(lse)), (out, lse))


def _next_for_own(rank: int, qs: Shards, ks: Shards, vs: Shards, positions: Positions = None) -> State:
    """Takes the block that arrives before it has used the one that leaves; the last block counts twice."""
    order = _order(rank, len(ks))
    return _over(rank, qs, ks, vs, [*order[1:], order[-1]])


def _three_steps(rank: int, qs: Shards, ks: Shards, vs: Shards, positions: Positions = None) -> State:
    return _over(rank, qs, ks, vs, _order(rank, len(ks))[:3])


def _three_causal_steps(rank: int, qs: Shards, ks: Shards, vs: Shards, positions: Positions) -> State:
    order = _order(rank, len(ks))[:3]
    return _over(rank, qs, ks, vs, order, lambda origin: global_mask(rank, origin, positions))


def _keys_only(rank: int, qs: Shards, ks: Shards, vs: Shards, positions: Positions = None) -> State:
    return fold(attend(qs[rank], ks[o], vs[rank]) for o in _order(rank, len(ks)))


FORWARD = (
    mistake("averages_blocks", _mean_of_blocks),
    mistake("forgets_last_block", _forgets_last),
    mistake("forgets_own_block", _forgets_first),
    mistake("own_block_twice", _own_twice),
    mistake("starts_at_zero", _from_zero),
    mistake("waits_too_early", _next_for_own),
    mistake("never_uses_the_visitor", _own_block_always),
    mistake("sends_own_block_again", _sends_own),
    mistake("shifts_keys_only", _keys_only),
    mistake("counts_to_three", _three_steps),
    mistake("sends_p_times"),
    mistake("splits_the_exchange"),
    mistake("gathers_everything"),
    mistake("repeats_heads_on_the_wire"),
    mistake("sends_too_many_bytes"),
    mistake("keeps_every_block"),
    mistake("does_not_unpack"),
    mistake("leaves_the_ring"),
    mistake("never_waits"),
    mistake("overflowing_ring"),
    mistake("low_precision_ring"),
    mistake("goes_on_without_the_dead"),
)


def _seen(see: See) -> Callable[..., State]:
    """An imitation that masks by `see(rank, origin, positions)`."""

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
