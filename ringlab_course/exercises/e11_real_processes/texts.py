"""Common mistakes in 11.order and 11.uneven with their texts; imitations are those of exercise 05.

They take (rank, qs, ks, vs, positions) and compute in float64.
"""

from __future__ import annotations

import numpy as np

from ringlab import oracle
from ringlab_course.checking.numbers import State, attend, fold
from ringlab_course.checking.overlap import MISTAKES as OF_ANY_RING
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("11")

ORDER = (
    mistake("all_send_first"),
    mistake("all_receive_first"),
    mistake("order_with_a_circle"),
    mistake("receives_from_the_next"),
    mistake("leaves_somebody_waiting"),
    mistake("sends_to_itself"),
    mistake("passes_on_what_arrived"),
    mistake("returns_its_own"),
    mistake("other_direction"),
    mistake("swaps_with_a_partner"),
    mistake("posts_and_leaves"),
    mistake("posts_both_at_once"),
    mistake("asks_torch_itself"),
    mistake("more_messages_than_needed"),
    mistake("receives_another_form"),
    mistake("one_after_another"),
)


def _swapped(rank, qs, ks, vs, positions=None) -> State:
    """Every second rank posts V before K: at a hop between an odd and an even rank a block's K becomes its V."""
    P, parts = len(ks), []
    for step in range(P):
        origin = (rank - step) % P
        hops = [((origin + hop) % P, (origin + hop + 1) % P) for hop in range(step)]
        odd = sum((sender + receiver) % 2 for sender, receiver in hops) % 2
        k, v = (vs[origin], ks[origin]) if odd else (ks[origin], vs[origin])
        parts.append(attend(qs[rank], k, v))
    return fold(parts)


def _padded(rank, qs, ks, vs, positions=None) -> State:
    """Blocks are filled up with zeros to the longest one, and attended to whole."""
    longest = max(k.shape[-2] for k in ks)

    def filled(x):
        x = oracle.float64(x)
        return np.concatenate([x, np.zeros((*x.shape[:-2], longest - x.shape[-2], x.shape[-1]))], axis=-2)

    order = [(rank - step) % len(ks) for step in range(len(ks))]
    return fold(attend(qs[rank], filled(ks[origin]), filled(vs[origin])) for origin in order)


UNEVEN = (
    mistake("length_unknown"),
    mistake("length_of_another_block"),
    mistake("leaves_with_nothing"),
    mistake("swaps_keys_and_values", _swapped),
    mistake("pads_to_the_longest"),
    mistake("talks_too_much"),
    mistake("counts_padding", _padded),
    *(
        OF_ANY_RING[name]
        for name in (
            "forgets_last_block", "forgets_own_block", "never_uses_the_visitor", "sends_own_block_again", "counts_to_three",
            "sends_p_times", "gathers_everything", "keeps_every_block", "does_not_unpack", "never_waits", "posts_after_computing",
            "waits_before_computing", "overlaps_some_steps", "computes_unseen", "cuts_the_computation", "one_buffer",
            "writes_what_is_sent", "reads_before_waiting", "looks_at_the_clock",
        )
    ),
)  # fmt: skip
