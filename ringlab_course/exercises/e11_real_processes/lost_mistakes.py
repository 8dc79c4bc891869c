"""Common mistakes in 11.lost as a learner is told them; those of any ring are exercise 05's."""

from __future__ import annotations

from ringlab_course.checking.ring_mistakes import FORWARD
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("11.lost")

OF_ANY_RING = {each.name: each for each in FORWARD}

LOST = (
    mistake("gives_up"),
    mistake("claims_the_missing"),
    mistake("hides_what_it_has"),
    mistake("merges_what_never_came"),
    mistake("throws_away"),
    mistake("drops_the_block_in_hand"),
    mistake("goes_on_after_the_death"),
    mistake("stops_with_the_first"),
    mistake("meets_at_a_barrier"),
    mistake("swallows_every_error"),
    mistake("swallows_a_mismatch"),
    mistake("scales_the_part"),
    mistake("names_steps"),
    mistake("names_the_other_way"),
    mistake("forgets_the_own_block"),
    *(
        OF_ANY_RING[name]
        for name in ("forgets_last_block", "sends_own_block_again", "never_uses_the_visitor", "sends_p_times", "does_not_unpack",
                     "leaves_the_ring", "never_waits", "splits_the_exchange", "gathers_everything", "sends_too_many_bytes",
                     "repeats_heads_on_the_wire")
    ),
)  # fmt: skip
