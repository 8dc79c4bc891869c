"""Common mistakes of the two rings of the capstone, by what they look like: in values, in messages, in behaviour."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ringlab_course.checking.backward_mistakes import COMPARED
from ringlab_course.checking.numbers import State
from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e18_capstone.truth import Held, ring, under_mask

mistake = mistakes_of("18.forward")
_as_in_05 = mistakes_of("05")
_as_in_09 = mistakes_of("09.couriers")


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


VALUES = (
    mistake("adds_blocks", ring(join=_adds)),
    mistake("halves_at_each_merge", ring(join=_halves)),
    mistake("no_scale", ring(scale=1.0)),
    mistake("heads_in_turn", ring(heads=lambda x, group: np.tile(x, (1, group, 1, 1)))),
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
    mistake("does_not_unpack"),
    mistake("assumes_equal_lengths"),
    mistake("never_waits"),
    mistake("leaves_the_ring"),
    mistake("writes_what_is_sent"),
    mistake("one_buffer"),
    mistake("reads_before_waiting"),
    mistake("nan_in_blind_rows"),
    mistake("overflows"),
    mistake("finite_mask"),
    mistake("ignores_the_scale"),
    mistake("swallows_a_death"),
    mistake("takes_any_length"),
    mistake("another_dtype"),
    mistake("gathers_everything"),
    mistake("too_many_messages"),
    mistake("sends_kv_home"),
    mistake("repeats_heads_on_the_wire"),
    mistake("widens_the_blocks"),
    mistake("pads_to_the_longest"),
    mistake("keeps_every_block"),
    mistake("computes_hidden_tiles"),
    mistake("cleans_hidden_tiles"),
)  # fmt: skip
FORWARD = (
    *VALUES,
    *SHARED,
    mistake("narrow_state"),
)
BACKWARD = (
    *COMPARED,
    *(replace(each, message=f"Backward: {each.message}") for each in SHARED),
    replace(_as_in_09("narrow_couriers"), name="narrow_sums"),
)
FORWARD_NAMED = {each.name: each for each in FORWARD}
BACKWARD_NAMED = {each.name: each for each in BACKWARD}
