"""Common mistakes in the forward and the causal ring, each with a function that makes the same one.

Imitations take (rank, qs, ks, vs, positions): the shards of all ranks, and the global positions of
their tokens, None without a mask. They compute in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ringlab import oracle
from ringlab.course.contract import Misconception
from ringlab.course.contracts.e05_mistakes import State, attend, fold

See = Callable[[int, int, list[np.ndarray]], np.ndarray]


def global_mask(rank: int, origin: int, positions) -> np.ndarray | None:
    """True where the key's global position is at or before the query's; None without positions."""
    if positions is None:
        return None
    return np.asarray(positions[rank])[:, None] >= np.asarray(positions[origin])[None, :]


def _over(rank, qs, ks, vs, origins, mask=lambda origin: None) -> State:
    return fold(attend(qs[rank], ks[o], vs[o], mask(o)) for o in origins)


def _order(rank: int, world_size: int) -> list[int]:
    return [(rank - step) % world_size for step in range(world_size)]


def truth(rank, qs, ks, vs, positions=None) -> State:
    """What rank `rank` should return: its queries against all keys (that it may see)."""
    k, v = (np.concatenate([oracle.float64(x) for x in xs], axis=-2) for xs in (ks, vs))
    if positions is None:
        return attend(qs[rank], k, v)
    columns = [global_mask(rank, origin, positions) for origin in range(len(ks))]
    return attend(qs[rank], k, v, np.concatenate(columns, axis=1))


def _mean_of_blocks(rank, qs, ks, vs, positions=None) -> State:
    parts = [attend(qs[rank], k, v) for k, v in zip(ks, vs, strict=True)]
    return np.mean([out for out, _ in parts], axis=0), fold(parts)[1]


def _own_block_always(rank, qs, ks, vs, positions=None) -> State:
    return _over(rank, qs, ks, vs, [rank] * len(ks))


def _sends_own(rank, qs, ks, vs, positions=None) -> State:
    return _over(rank, qs, ks, vs, [rank] + [(rank - 1) % len(ks)] * (len(ks) - 1))


def _forgets_last(rank, qs, ks, vs, positions=None) -> State:
    here = _order(rank, len(ks))[:-1]
    if not here:
        q = oracle.float64(qs[rank])
        return np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)
    return _over(rank, qs, ks, vs, here)


def _forgets_first(rank, qs, ks, vs, positions=None) -> State:
    return _over(rank, qs, ks, vs, _order(rank, len(ks))[1:])


def _three_steps(rank, qs, ks, vs, positions=None) -> State:
    return _over(rank, qs, ks, vs, _order(rank, len(ks))[:3])


def _three_causal_steps(rank, qs, ks, vs, positions) -> State:
    order = _order(rank, len(ks))[:3]
    return _over(rank, qs, ks, vs, order, lambda origin: global_mask(rank, origin, positions))


def _keys_only(rank, qs, ks, vs, positions=None) -> State:
    return fold(attend(qs[rank], ks[o], vs[rank]) for o in _order(rank, len(ks)))


FORWARD = (
    Misconception(
        "averages_blocks",
        "You averaged the blocks' outputs. Ring attention is exact because partials are merged by their lse: "
        "a block with heavier keys counts for more.",
        _mean_of_blocks,
    ),
    Misconception(
        "forgets_last_block",
        "One block was never used: the one that arrives last. There are P − 1 hops but P blocks to attend to, "
        "your own and P − 1 visitors.",
        _forgets_last,
    ),
    Misconception(
        "forgets_own_block",
        "Your own block was never used: you shifted before the first attention. Step 0 needs no message.",
        _forgets_first,
    ),
    Misconception(
        "never_uses_the_visitor",
        "Every step used your own K/V again. What shift returns is a new pair of tensors: go on with those.",
        _own_block_always,
    ),
    Misconception(
        "sends_own_block_again",
        "Every step sent your own K/V again, so the neighbour's block is all you ever see. Pass on what arrived: "
        "a block travels the whole ring only if every rank forwards it. (With two ranks nobody notices.)",
        _sends_own,
    ),
    Misconception(
        "shifts_keys_only",
        "The keys travelled and the values stayed at home: weights computed from one block were applied to the "
        "values of another. K and V move together, in one shift.",
        _keys_only,
    ),
    Misconception(
        "counts_to_three",
        "Blocks that arrive after the third step were never used: the number of steps is ring.world_size, not a constant.",
        _three_steps,
    ),
    Misconception(
        "sends_p_times",
        "There is one exchange too many: P blocks need P − 1 hops. The last block that arrives is used and need "
        "not travel on; sending it home costs a P-th of the traffic for nothing.",
    ),
    Misconception(
        "splits_the_exchange",
        "K and V travel in exchanges of their own, which doubles the number of rounds and pays every latency "
        "twice. Send them together: ring.shift(k, v).",
    ),
    Misconception(
        "gathers_everything",
        "Messages go to ranks that are no neighbours: that is an all-gather. It moves the same bytes, but every "
        "rank then holds the whole sequence. Use ring.shift, which only ever sends to the next rank.",
    ),
    Misconception(
        "repeats_heads_on_the_wire",
        "More bytes travel than K and V hold, by the number of query heads that share a K/V head: you repeated "
        "the heads before sending. Send K and V as they are and repeat them, if at all, where they are used.",
    ),
    Misconception(
        "sends_too_many_bytes",
        "More bytes travel than K and V hold. Send only K and V, in the dtype they came in.",
    ),
    Misconception(
        "keeps_every_block",
        "Memory grows with the number of ranks: blocks are kept after they were used. A rank needs its shard, the "
        "block it works on and the one arriving; merge a block's partial at once and let the block go.",
    ),
    Misconception(
        "does_not_unpack",
        "A tuple stands where a tensor should be. What comes back from ring.shift(k, v) and from work.wait() is a "
        "tuple, with a tensor for each that was sent; unpack it: k, v = … (ring_step returns a tuple as well.)",
    ),
    Misconception(
        "leaves_the_ring",
        "A rank left the ring while another one still waited for it. Every rank makes the same P − 1 exchanges: one "
        "that has nothing to see must still pass the block on, as somebody behind it waits for that block.",
    ),
    Misconception(
        "never_waits",
        "An exchange was begun and never waited for: ring.post returns at once, and the block is only here after "
        "k, v = work.wait(), which every post needs before the next step.",
    ),
    Misconception(
        "overflowing_ring",
        "A result is infinite or NaN although every score is finite: raw exponentials were summed over the blocks. Carry "
        "(out, lse) from step to step and merge with logaddexp.",
    ),
    Misconception(
        "low_precision_ring",
        "The result is only as good as bfloat16 although the inputs are the only thing rounded to it: out or lse are "
        "rounded in every step. Convert to float32 for the computation; what travels stays bfloat16.",
    ),
    Misconception(
        "goes_on_without_the_dead",
        "A rank died, and another one returned numbers all the same: the error of its wait was caught. Attention over a "
        "part of the sequence looks like any other result, and nobody will notice. Let the error through: a run that "
        "stops can be started again.",
    ),
)


def _seen(see: See) -> Callable[..., State]:
    """An imitation that masks by `see(rank, origin, positions)`."""

    def imitate(rank, qs, ks, vs, positions) -> State:
        order = _order(rank, len(ks))
        return _over(rank, qs, ks, vs, order, lambda origin: see(rank, origin, positions))

    return imitate


def _shape(rank: int, origin: int, positions) -> tuple[int, int]:
    return len(positions[rank]), len(positions[origin])


def _everything(rank, origin, positions) -> np.ndarray:
    return np.ones(_shape(rank, origin, positions), dtype=bool)


def _local(rank, origin, positions) -> np.ndarray:
    return np.tril(_everything(rank, origin, positions))


def _own_only(rank, origin, positions) -> np.ndarray:
    return (_local if rank == origin else _everything)(rank, origin, positions)


def _by_rank(rank, origin, positions) -> np.ndarray:
    return (
        _local(rank, origin, positions)
        if rank == origin
        else np.full(_shape(rank, origin, positions), origin < rank)
    )


def _strict(rank, origin, positions) -> np.ndarray:
    return np.asarray(positions[rank])[:, None] > np.asarray(positions[origin])[None, :]


def _upper(rank, origin, positions) -> np.ndarray:
    return np.asarray(positions[rank])[:, None] <= np.asarray(positions[origin])[None, :]


def _plus_step(rank, origin, positions) -> np.ndarray:
    step = (rank - origin) % len(positions)
    return global_mask(rank, (rank + step) % len(positions), positions)


CAUSAL = (
    Misconception(
        "no_mask",
        "No mask at all: queries see keys that come after them.",
        _seen(_everything),
    ),
    Misconception(
        "local_mask",
        "Every block was masked by local index. A token's place in its shard is not its place in the sequence: "
        "compare the global positions of the queries with those of the keys that are here now.",
        _seen(_local),
    ),
    Misconception(
        "masks_own_block_only",
        "Only your own block was masked; visitors were seen whole. A visiting block may lie after your queries.",
        _seen(_own_only),
    ),
    Misconception(
        "assumes_contiguous",
        "Whole blocks were taken or skipped by comparing ranks. That holds only if rank r owns the r-th stretch of the "
        "sequence; elsewhere two shards interleave. Compare positions, not ranks.",
        _seen(_by_rank),
    ),
    Misconception(
        "strictly_before",
        "A token does not see itself: the mask is q position ≥ k position, not >.",
        _seen(_strict),
    ),
    Misconception(
        "sees_the_future",
        "The mask is upside down: queries see the keys at and after their own position instead of those at and before.",
        _seen(_upper),
    ),
    Misconception(
        "origin_plus_step",
        "The mask belongs to another block than the one that is here. Blocks move to the right, to rank + 1, so after "
        "`step` shifts the block here is that of rank − step: ring.origin(step).",
        _seen(_plus_step),
    ),
    Misconception(
        "looks_at_three_blocks",
        "Queries met three blocks and no more. A causal mask hides what comes later; it is no window, and everything "
        "earlier must be met: go round the whole ring.",
        _three_causal_steps,
    ),
    Misconception(
        "nan_in_blind_blocks",
        "There is a NaN where some queries see no key of a block. Their part of that block is the identity (0, −inf): "
        "make sure that your step leaves such rows as they were.",
    ),
    Misconception(
        "skips_the_shift",
        "A rank that has nothing to see in a block must still pass it on: somebody behind it waits for that block. "
        "Skip the computation if you like, never the exchange.",
    ),
    Misconception(
        "assumes_equal_lengths",
        "The shards have different lengths, and the buffer for what arrives has the length of what is sent. Say how "
        "many tokens are coming: ring.shift(k, v, length=…), the number of positions of the block due next.",
    ),
    Misconception(
        "pads_the_blocks",
        "Blocks travel padded to the longest shard. ring.shift(k, v, length=…) lets each travel in its own length.",
    ),
)
