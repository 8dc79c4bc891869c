"""Common mistakes of the two rings of the capstone, by what they look like: in values, in messages, in behaviour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ringlab.course.contract import Misconception
from ringlab.course.contracts.e05_mistakes import State
from ringlab.course.contracts.e05_ring_mistakes import CAUSAL
from ringlab.course.contracts.e05_ring_mistakes import FORWARD as FORWARD_05
from ringlab.course.contracts.e09_ring_mistakes import COMPARED
from ringlab.course.contracts.e09_ring_mistakes import NAMED as NAMED_09
from ringlab.course.contracts.e18_truth import Held, ring, under_mask

_TEXTS = {mistake.name: mistake.message for mistake in (*CAUSAL, *FORWARD_05)}


def _adds(a: State, b: State) -> State:
    return a[0] + b[0], np.logaddexp(a[1], b[1])


def _halves(a: State, b: State) -> State:
    return (a[0] + b[0]) / 2, np.logaddexp(a[1], b[1])


def _all(held: Held, rank: int, owner: int) -> np.ndarray:
    return np.ones(held.shape(rank, owner), dtype=bool)


def _local(held: Held, rank: int, owner: int) -> np.ndarray:
    return np.tri(*held.shape(rank, owner), dtype=bool)


def _by_rank(held: Held, rank: int, owner: int) -> np.ndarray:
    return _local(held, rank, owner) if rank == owner else np.full(held.shape(rank, owner), owner < rank)


def _strict(held: Held, rank: int, owner: int) -> np.ndarray:
    return held.positions[rank][:, None] > held.positions[owner][None, :]


def _future(held: Held, rank: int, owner: int) -> np.ndarray:
    return held.positions[rank][:, None] <= held.positions[owner][None, :]


def _plus_step(held: Held, rank: int, owner: int) -> np.ndarray:
    other = (2 * rank - owner) % held.run.P
    seen = held.visible(rank, other)
    if seen.shape != held.shape(rank, owner):
        raise ValueError("another block's mask does not fit, and this mistake breaks off")
    return seen


def _own_only(held: Held, rank: int, owner: int) -> np.ndarray:
    return held.visible(rank, owner) if rank == owner else _all(held, rank, owner)


def _as_in_05(name: str, imitate: Callable[..., State]) -> Misconception:
    return Misconception(name, _TEXTS[name], imitate)


VALUES = (
    Misconception(
        "adds_blocks",
        "The blocks' outputs are added as they are. Each is normalised over its own keys, so their sum counts every key as if the other "
        "blocks did not exist: weigh each by e^(its lse − the joint lse).",
        ring(join=_adds),
    ),
    Misconception(
        "halves_at_each_merge",
        "Each merge takes the mean of what was there and what is new. How much a block counts says its lse, not the order in which it comes.",
        ring(join=_halves),
    ),
    Misconception(
        "no_scale",
        "The scores are not divided by √D. scale=None stands for 1/√D, also where your ring hands it on to attend_block.",
        ring(scale=1.0),
    ),
    Misconception(
        "heads_in_turn",
        "Query heads are paired with K/V heads in turn, h % K. The heads that share a K/V head are neighbours: h // (H // K).",
        ring(heads=lambda x, group: np.tile(x, (1, group, 1, 1))),
    ),
    _as_in_05("forgets_last_block", ring(steps=lambda P: range(P - 1))),
    _as_in_05("forgets_own_block", ring(steps=lambda P: range(1, P))),
    _as_in_05("never_uses_the_visitor", ring(here=lambda rank, owner, P: rank)),
    _as_in_05(
        "sends_own_block_again", ring(here=lambda rank, owner, P: rank if owner == rank else (rank - 1) % P)
    ),
    _as_in_05("no_mask", ring(see=under_mask(_all))),
    _as_in_05("local_mask", ring(see=under_mask(_local))),
    _as_in_05("assumes_contiguous", ring(see=under_mask(_by_rank))),
    _as_in_05("strictly_before", ring(see=under_mask(_strict))),
    _as_in_05("sees_the_future", ring(see=under_mask(_future))),
    _as_in_05("origin_plus_step", ring(see=under_mask(_plus_step))),
    _as_in_05("masks_own_block_only", ring(see=under_mask(_own_only))),
)  # fmt: skip

SHARED = (
    Misconception(
        "does_not_unpack",
        "A tuple stands where a tensor should be: ring.shift(k, v) and wait() return a tuple, with a tensor for each that was sent.",
    ),
    Misconception(
        "assumes_equal_lengths",
        "Shards differ in length, and what arrives was taken to be as long as what is sent. ring.post(…, length=…) says how many tokens "
        "come: those of the rank whose block, or courier, is due next.",
    ),
    Misconception(
        "never_waits",
        "An exchange was begun and never waited for. Every post needs its wait(), also on the last step.",
    ),
    Misconception(
        "leaves_the_ring",
        "A rank left the ring while another one waited for it. Who sees nothing of a block, or holds no tokens, computes nothing; it "
        "still passes on what the others need.",
    ),
    Misconception(
        "writes_what_is_sent",
        "A tensor was written while it was on its way. Until wait() returns, what is sent may be read, not changed: add into another.",
    ),
    Misconception(
        "one_buffer",
        "What arrives is received into tensors that are being sent. Take other buffers, or none: the ring makes them.",
    ),
    Misconception(
        "reads_before_waiting",
        "There is a NaN though nothing is masked and all scores are small: a receive buffer was read before wait() returned it. It belongs "
        "to the transport until then.",
    ),
    Misconception(
        "nan_in_blind_rows",
        "There is a NaN as soon as a mask leaves a row without keys in some block: −inf − (−inf). Such a row's part is (0, −inf), and it "
        "adds nothing to any gradient.",
    ),
    Misconception(
        "overflows",
        "There is a NaN or an infinity, or all is lost, where scores are large or far below 0: exp of a raw score or of a raw lse. Only "
        "differences belong into exp.",
    ),
    Misconception(
        "finite_mask",
        "Hidden scores are a large negative number in place of −inf. Where the visible ones are lower still, hidden keys win: scores of "
        "−16,000 come out of real biases. And a row that sees nothing gets the mean of what it must not see.",
    ),
    Misconception(
        "ignores_the_scale",
        "All holds with 1/√D, and a scale that is given is ignored. Hand it on to every place where scores are made.",
    ),
    Misconception(
        "swallows_a_death",
        "A rank died, and another one returned a result all the same. Attention over a part of the sequence looks like any other, and "
        "nobody will notice: let the error of wait() through.",
    ),
    Misconception(
        "takes_any_length",
        "One rank was given a token fewer than `positions` says, and the ring went on. Nothing may be padded, cut, or read from what was "
        "never written: ask for the lengths that positions has, or compare them first.",
    ),
    Misconception(
        "another_dtype",
        "A result has another dtype than it should: out, dq, dk and dv come back as q, k and v came in, however you computed them.",
    ),
    Misconception(
        "gathers_everything",
        "Messages go to ranks that are not the next one: that is a gather, or an all-to-all. Everything goes to the next rank.",
    ),
    Misconception(
        "too_many_messages",
        "There are more messages than K, V, dK and dV need in their hops. Send what goes together together, and nothing twice.",
    ),
    Misconception(
        "sends_kv_home",
        "K and V make P hops in place of P − 1. The last rank that needs a block is the one before its owner, who has it.",
    ),
    Misconception(
        "repeats_heads_on_the_wire",
        "Once for each query head, K and V travel, or their gradients: the bytes are H / K times those of the K/V heads. Spread heads "
        "where you multiply, add up gradients before you send.",
    ),
    Misconception(
        "widens_the_blocks",
        "bfloat16 K and V travel as float32, in twice the bytes. Convert where you compute.",
    ),
    Misconception(
        "pads_to_the_longest",
        "Where shards differ in length, more bytes travel than there are tokens: blocks, or gradients, are padded to the longest. "
        "ring.post(…, length=…) lets each travel as long as it is.",
    ),
    Misconception(
        "keeps_every_block",
        "Memory grows with the number of ranks while shards stay as large: blocks, scores or gradients are kept from step to step. What "
        "has been used is let go.",
    ),
    Misconception(
        "computes_hidden_tiles",
        "Keys that no query of a run may see have touched its rows: the tile was computed and thrown away by a mask (the probe is a NaN, "
        "and 0 · NaN is NaN). In a causal ring that is half of all work.",
    ),
    Misconception(
        "cleans_hidden_tiles",
        "Contiguous, the first rank sees one block and the last one sees all, and both have the same work: tiles that a mask hides are "
        "computed all the same, and what comes of them is cleaned away. Ask whether a row may see any key before you multiply.",
    ),
)  # fmt: skip
FORWARD = (
    *VALUES,
    *SHARED,
    Misconception(
        "narrow_state",
        "out or lse are rounded to bfloat16 at every block: the error grows with the number of ranks. Keep the state in float32 until the "
        "last block, then round once.",
    ),
)
BACKWARD = (
    *COMPARED,
    *(replace(mistake, message=f"Backward: {mistake.message}") for mistake in SHARED),
    replace(NAMED_09["narrow_couriers"], name="narrow_sums", imitate=None),
)
FORWARD_NAMED = {mistake.name: mistake for mistake in FORWARD}
BACKWARD_NAMED = {mistake.name: mistake for mistake in BACKWARD}
