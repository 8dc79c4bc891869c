"""Common mistakes in 11.lost as a learner is told them; those of any ring are exercise 05's."""

from __future__ import annotations

from ringlab.course.contract import Misconception
from ringlab.course.contracts.e05_ring_mistakes import FORWARD

OF_ANY_RING = {mistake.name: mistake for mistake in FORWARD}

LOST = (
    Misconception(
        "gives_up",
        "PeerDiedError went through, and all that was computed is lost with the dead rank. Catch it around the exchange, leave "
        "the loop, and return what you have.",
    ),
    Misconception(
        "claims_the_missing",
        "`seen` names blocks that are not in (out, lse). A part that calls itself the whole is worse than none: whoever "
        "merges the rest later will never merge what is missing.",
    ),
    Misconception(
        "hides_what_it_has",
        "(out, lse) hold more blocks than `seen` names: when the rest is merged, those will count twice. Name a block when "
        "you merge it.",
    ),
    Misconception(
        "merges_what_never_came",
        "There is a NaN: the buffer of a message that failed was attended to. Where wait or shift raises, nothing has "
        "arrived; go on with nothing.",
    ),
    Misconception(
        "throws_away",
        "Only the own block is left: what had been merged before the death was thrown away. The state up to the failed "
        "exchange is as good as ever.",
    ),
    Misconception(
        "drops_the_block_in_hand",
        "One block is missing that had arrived: it was in hand when the next exchange failed. Merge what is here before you "
        "ask for more, or after the error.",
    ),
    Misconception(
        "goes_on_after_the_death",
        "After the error the loop went on, and the block in hand was merged again: its keys count more than once. Leave the loop, and ask "
        "nothing of the ring any more.",
    ),
    Misconception(
        "stops_with_the_first",
        "All ranks stopped in the same step, as if each were the dead one's neighbour. News of a death travel one rank per step, and "
        "what is still on its way arrives. Do not ask in every step whether all are alive: a barrier waits for the dead, too.",
    ),
    Misconception(
        "meets_at_a_barrier",
        "After the error the ring was used once more: a collective waits for all ranks, the dead one included, and fails "
        "again. What you have is complete without it: return.",
    ),
    Misconception(
        "swallows_every_error",
        "An error of the program itself was caught as well and came out as half an answer. Only PeerDiedError says that a rank "
        "died: catch that one, around the exchange alone.",
    ),
    Misconception(
        "swallows_a_mismatch",
        "Blocks of different lengths met in an exchange. That is a MismatchError, a bug that somebody has to mend, and it was taken for "
        "a death and came out as half an answer. Around the exchange, too, catch PeerDiedError alone: not Exception, and no other of "
        "its bases.",
    ),
    Misconception(
        "scales_the_part",
        "The part was scaled up, as if every block weighed the same. A partial is right as it is, for the keys it has seen; its lse "
        "says how much they weigh.",
    ),
    Misconception(
        "names_steps",
        "`seen` counts steps 0, 1, 2, … instead of naming ranks. In step t the block of rank − t is here: ring.origin(t).",
    ),
    Misconception(
        "names_the_other_way",
        "`seen` names the ranks the other way round, rank + t. Blocks move to the right, so what comes in step t is that of "
        "rank − t: ring.origin(t).",
    ),
    Misconception(
        "forgets_the_own_block",
        "`seen` begins with the first visitor. Your own block is in as well: it is that of step 0.",
    ),
    *(
        OF_ANY_RING[name]
        for name in ("forgets_last_block", "sends_own_block_again", "never_uses_the_visitor", "sends_p_times", "does_not_unpack",
                     "leaves_the_ring", "never_waits", "splits_the_exchange", "gathers_everything", "sends_too_many_bytes",
                     "repeats_heads_on_the_wire")
    ),
)  # fmt: skip
