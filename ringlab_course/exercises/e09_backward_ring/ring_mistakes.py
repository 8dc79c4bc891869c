"""Common mistakes of the backward ring: what shows in values, and how it behaves."""

from __future__ import annotations

from ringlab_course.checking.backward_mistakes import COMPARED
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("09.couriers")

BEHAVES = (
    mistake("reads_before_waiting"),
    mistake("overflowing_ring"),
    mistake("writes_what_is_sent"),
    mistake("one_buffer"),
    mistake("does_not_unpack"),
    mistake("never_waits"),
    mistake("leaves_the_ring"),
    mistake("assumes_equal_lengths"),
    mistake("gathers_everything"),
    mistake("sends_kv_home"),
    mistake("sends_to_itself"),
    mistake("starts_after_the_owner"),
    mistake("repeats_heads_on_the_wire"),
    mistake("narrow_couriers"),
    mistake("widens_the_blocks"),
    mistake("keeps_every_block"),
    mistake("splits_the_exchange"),
    mistake("computes_unseen"),
    mistake("nothing_hidden"),
    mistake("waits_for_the_courier"),
)
MISTAKES = (*COMPARED, *BEHAVES)
NAMED = {each.name: each for each in MISTAKES}
