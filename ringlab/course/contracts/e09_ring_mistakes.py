"""Common mistakes of the backward ring: what is seen, who adds to what, and where a courier ends.

Imitations take (rank, problem) and return (dq, dk, dv) in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringlab import oracle
from ringlab.course.contract import Misconception
from ringlab.course.contracts.e09_truth import Gradients, Parts, Problem, parts_of, sum_over

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


def _by_rank(problem: Problem, rank: int, owner: int) -> np.ndarray:
    shape = _shape(problem, rank, owner)
    return np.tri(*shape, dtype=bool) if rank == owner else np.full(shape, owner < rank)


def _plus_step(problem: Problem, rank: int, owner: int) -> np.ndarray:
    return problem.mask(rank, (2 * rank - owner) % problem.world_size)


def _strictly(problem: Problem, rank: int, owner: int) -> np.ndarray:
    return problem.positions[rank].numpy()[:, None] > problem.positions[owner].numpy()[None, :]


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
    """What has arrived is added to what was sent away, which therefore counts again in every step."""
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


SUMS = (
    Misconception(
        "goes_the_other_way",
        "The gradients travel against the blocks. Then a courier meets, in every step, a rank that holds another block than its own, "
        "and collects gradients of K/V that it does not belong to. dK and dV travel with their block, to the next rank. "
        "(With two ranks both directions are the same, and nobody notices.)",
        _other_way,
    ),
    Misconception(
        "ends_at_the_neighbour",
        "dK and dV are those of the next rank's block: the couriers are one hop short of home. After P − 1 hops every block has been "
        "everywhere, and each rank holds the sum that belongs to its neighbour. The P-th hop brings it home.",
        _which(home=1),
    ),
    Misconception(
        "one_hop_too_far",
        "dK and dV are those of the previous rank's block: the couriers went past home. They make P hops, no more.",
        _which(home=-1),
    ),
    Misconception(
        "gradients_stay",
        "dK and dV never travelled: each rank returned the sum of what it computed itself, over the blocks of all ranks. The gradient of "
        "a block is a sum over the ranks that saw it, so the sum has to follow the block.",
        _own_sums,
    ),
    Misconception(
        "owner_alone",
        "Only what the owner itself added came home; what the other ranks added is lost. Either nothing is added on the way, or it is "
        "added into a buffer whose message arrives later and writes over it: wait first, then add.",
        _which(dkv=lambda c, o, P: c == o),
    ),
    Misconception(
        "last_rank_alone",
        "Only what the last rank on the way added came home: each rank put its own gradient in place of the sum that had arrived. Add to "
        "it.",
        _which(dkv=lambda c, o, P: c == (o - 1) % P),
    ),
    Misconception(
        "drops_own_block",
        "Step 0 is missing everywhere: your own block, the one with the diagonal, adds to dQ, dK and dV as any other does.",
        _which(dq=lambda c, o, P: c != o, dkv=lambda c, o, P: c != o),
    ),
    Misconception(
        "couriers_start_empty",
        "dQ is right; in dK and dV the owner's own part is missing. The courier leaves with the owner's gradient in it: add first, then send.",
        _which(dkv=lambda c, o, P: c != o),
    ),
    Misconception(
        "drops_last_block",
        "The block that arrives last was never used: there are P − 1 hops of K/V and P blocks to compute with.",
        _which(dq=lambda c, o, P: P == 1 or o != (c + 1) % P, dkv=lambda c, o, P: P == 1 or o != (c + 1) % P),
    ),
    Misconception(
        "counts_to_three",
        "Blocks that arrive after the third step were never used: the number of steps is ring.world_size, not a constant.",
        _which(dq=lambda c, o, P: (c - o) % P < 3, dkv=lambda c, o, P: (c - o) % P < 3),
    ),
    Misconception(
        "dq_of_the_last_block",
        "dK and dV are right; dQ holds the last block's part alone. dQ stays at home, and every block adds to it.",
        _which(dq=lambda c, o, P: o == (c + 1) % P),
    ),
    Misconception(
        "counts_what_was_sent",
        "What arrived was added to what you had sent away, so that sums already on their way are counted again in every step. What you "
        "send is gone: go on with what has arrived.",
        _added_to_what_was_sent,
    ),
    Misconception(
        "averages_the_ranks",
        "dK and dV are divided by the number of ranks. A gradient is the sum of all the ways in which the loss depends on a key, and no "
        "mean.",
        _mean,
    ),
    Misconception(
        "swaps_dk_and_dv",
        "dK and dV have changed places: they were packed in one order and unpacked in another. Both have the same shape, so nothing crashes; a "
        "package in wide use mixed up what it had received, and its tests were too lenient to notice.",
        _swapped,
    ),
    Misconception(
        "scales_dq_again",
        "dQ has the factor 1/√D twice: block_backward has put it in already.",
        _scaled_again,
    ),
    Misconception(
        "lse_of_the_block",
        "P was normalised over one block's keys. A block holds a share of each row's weights, e^(s − lse) with the lse over all keys: the "
        "one that you are given.",
        _block_lse,
    ),
)

SEEN = (
    Misconception(
        "no_mask",
        "There is no mask: keys get gradients from queries that come before them. The backward hides what the forward hid.",
        _sees(lambda p, r, o: np.ones(_shape(p, r, o), dtype=bool)),
    ),
    Misconception(
        "local_mask",
        "Every block was masked by local index. Compare the global positions of your queries with those of the keys that are here.",
        _sees(lambda p, r, o: np.tri(*_shape(p, r, o), dtype=bool)),
    ),
    Misconception(
        "assumes_contiguous",
        "Whole blocks were taken or skipped by comparing ranks. That holds only where rank r owns the r-th stretch; elsewhere two shards "
        "interleave. Compare positions.",
        _sees(_by_rank),
    ),
    Misconception(
        "strictly_before",
        "A token does not see itself here: the mask is q position ≥ k position, not >.",
        _sees(_strictly),
    ),
    Misconception(
        "sees_the_future",
        "The mask is upside down: keys get their gradients from the queries before them.",
        _sees(lambda p, r, o: p.mask(o, r).T),
    ),
    Misconception(
        "origin_plus_step",
        "The mask belongs to another block than the one that is here: after `step` hops to the right it is that of rank − step, "
        "ring.origin(step).",
        _sees(_plus_step),
    ),
    Misconception(
        "never_uses_the_visitor",
        "Every step used your own K and V again, and their gradients were given to the couriers of other blocks. Go on with what has "
        "arrived. (A well-known framework had this bug.)",
        _holds(lambda r, o, P: r),
    ),
    Misconception(
        "sends_own_block_again",
        "Every step sent your own K and V again, so the neighbour's block is all you ever see. Pass on what has arrived.",
        _holds(lambda r, o, P: r if o == r else (r - 1) % P),
    ),
)

BEHAVES = (
    Misconception(
        "reads_before_waiting",
        "There is a NaN although all inputs are finite and every query sees a key: a buffer was used before its message was there. Until wait() returns "
        "it, a receive buffer belongs to the transport. Wait, then add, then send on.",
    ),
    Misconception(
        "overflowing_ring",
        "There is a NaN where scores are large: exp of a raw score, or of a raw lse, is infinite in float32. The weights are exp(score − "
        "lse), the exponential of the difference.",
    ),
    Misconception(
        "writes_what_is_sent",
        "A tensor was written while it was on its way: the sum that you add to is the one you have posted. Until wait() returns, what is "
        "sent may be read, not changed. Add into what has arrived, or into a tensor of its own.",
    ),
    Misconception(
        "one_buffer",
        "What arrives is received into the tensors that are being sent. The neighbour still reads them: give the transport buffers of "
        "their own, or none.",
    ),
    Misconception(
        "does_not_unpack",
        "A tuple stands where a tensor should be. ring.shift and wait() return a tuple, with a tensor for each that was sent: unpack it.",
    ),
    Misconception(
        "never_waits",
        "An exchange was begun and never waited for. Every post needs its wait(), the last courier's too: what it brings is your result.",
    ),
    Misconception(
        "leaves_the_ring",
        "A rank left the ring while another one waited for it. Who sees nothing of a block has nothing to add, but still passes on the "
        "block and its courier.",
    ),
    Misconception(
        "assumes_equal_lengths",
        "Shards have different lengths, and what arrives was given the length of what is sent. Say how many tokens come: length=…, for "
        "K/V those of the next block, for dK/dV those of the courier due next; the last one due is your own.",
    ),
    Misconception(
        "gathers_everything",
        "Messages go to ranks that are not the next one. Contributions could be sent straight to their owners, but then every rank talks to "
        "all the others, or holds gradients of the whole sequence. Here everything goes to the next rank.",
    ),
    Misconception(
        "sends_kv_home",
        "K and V make a hop too many: P in place of P − 1. Their owner has them. Only the gradients, which it does not have, go all the "
        "way home.",
    ),
    Misconception(
        "sends_to_itself",
        "One rank alone sends nothing, not even to itself: its gradients are at home when they are computed.",
    ),
    Misconception(
        "starts_after_the_owner",
        "Every value is right, but the couriers make P − 1 hops: some terms wait, at home or for a second lap. Here a courier starts "
        "at its owner, with the owner's term in it, and makes P hops.",
    ),
    Misconception(
        "repeats_heads_on_the_wire",
        "More bytes travel than there are K/V heads: heads were repeated before sending, or dK and dV are sent once for each query head. "
        "Add up what the heads that share a K/V head contribute, then send.",
    ),
    Misconception(
        "narrow_couriers",
        "The sums of dK and dV are rounded to bfloat16 on the way. Every hop rounds again what all hops before it have added up; keep "
        "them, and send them, in float32.",
    ),
    Misconception(
        "widens_the_blocks",
        "bfloat16 K and V were turned into float32 before they were sent, which doubles their bytes. Send them as they came; it is the "
        "sums that need float32.",
    ),
    Misconception(
        "keeps_every_block",
        "Memory grows with the number of ranks: blocks or gradients are kept from step to step. A block's gradient leaves with its "
        "courier; nothing of it stays.",
    ),
    Misconception(
        "splits_the_exchange",
        "There are more exchanges than 2P − 1: tensors that travel together were sent one by one, and each pays a latency. K with V, dK "
        "with dV.",
    ),
    Misconception(
        "computes_unseen",
        "No computation is seen: call ring.compute(label, block_backward, …) once for each block. It calls your function, and the virtual "
        "clock sees it.",
    ),
    Misconception(
        "nothing_hidden",
        "Every exchange is waited for while nobody computes. Post K and V before you compute with them, and let the couriers travel while "
        "the next block is computed.",
    ),
    Misconception(
        "waits_for_the_courier",
        "Some hops are hidden and others are not. The courier of a block is needed only when the *next* block's gradients are "
        "ready: post it, compute, then wait. Only the last hop has nothing left to hide behind.",
    ),
)
COMPARED = (*SUMS, *SEEN)
MISTAKES = (*COMPARED, *BEHAVES)
NAMED = {mistake.name: mistake for mistake in MISTAKES}
