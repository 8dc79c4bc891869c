"""Common mistakes in 11.order and 11.uneven as a learner is told them; imitations are those of exercise 05.

They take (rank, qs, ks, vs, positions) and compute in float64.
"""

from __future__ import annotations

import numpy as np

from ringlab import oracle
from ringlab.course.contract import Misconception
from ringlab.course.contracts.e05_mistakes import State, attend, fold
from ringlab.course.contracts.e06_overlap import MISTAKES as OF_ANY_RING

ORDER = (
    Misconception(
        "all_send_first",
        "Every rank begins with a send, so nobody receives and every send waits for ever: the ranks wait in a circle. That a "
        "small message sometimes gets through elsewhere is due to a buffer, which no rule promises. Let some ranks receive first.",
    ),
    Misconception(
        "all_receive_first",
        "Every rank begins with a receive, so nobody sends: the same circle, the other way round. Some ranks have to send first.",
    ),
    Misconception(
        "order_with_a_circle",
        "The ranks wait for each other in a circle. Follow it in the drawing: each of them begins with the operation whose "
        "other end comes second on its neighbour. Neighbours have to begin with different operations.",
    ),
    Misconception(
        "leaves_somebody_waiting",
        "A rank waits for one that has ended. In a ring there is no first and no last rank: each of them sends once and receives "
        "once, the last one to rank 0.",
    ),
    Misconception(
        "sends_to_itself",
        "One rank alone is its own neighbour: a send that blocks until it is received can never end there, as the receive "
        "comes after it. With one rank there is nothing to send.",
    ),
    Misconception(
        "passes_on_what_arrived",
        "Ranks that receive first sent on what they had just received, not their own x. Keep what arrives apart from what "
        "you still have to send: x = receive(…) before send(ring, x, …) loses your x.",
    ),
    Misconception(
        "returns_its_own",
        "Every rank returns its own x. What came from the previous rank is what receive returns.",
    ),
    Misconception(
        "other_direction",
        "Every rank returns the next rank's x: the ring turns the other way. Send to ring.next, receive from ring.previous.",
    ),
    Misconception(
        "swaps_with_a_partner",
        "Ranks swapped with a partner, 0 with 1, 2 with 3: no circle and no deadlock, but no ring either. Sender and receiver are "
        "two different neighbours, unless there are two ranks only.",
    ),
    Misconception(
        "posts_and_leaves",
        "An exchange was begun and never waited for. A rank that ends while its message is on the way may take it along into "
        "the grave: a blocking send waits.",
    ),
    Misconception(
        "posts_both_at_once",
        "Send and receive were posted together, in one exchange. That cures every deadlock, and it is what you should do "
        "in earnest; here the point is to see which order works without it. Use send and receive, one after the other.",
    ),
    Misconception(
        "more_messages_than_needed",
        "More messages travel than one from each rank to the next. A shift is one send and one receive per rank: no "
        "collective, no round trip, no second try.",
    ),
    Misconception(
        "receives_another_form",
        "What is received has another shape or dtype than what is sent. gloo itself would not notice and fill your buffer with "
        "bytes. Receive into a tensor like x.",
    ),
    Misconception(
        "one_after_another",
        "The answer is right and the ranks work one after another: as most of them wait for a receiver, a single message is "
        "under way at a time, and the time grows with the number of ranks. Let every second rank receive first.",
    ),
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
    Misconception(
        "length_unknown",
        "The shards have different lengths, and the buffer for what arrives has that of what is sent. No rank can look into "
        "another one's memory: let them tell each other, ring.all_gather of a tensor that holds the length, before the first block travels.",
    ),
    Misconception(
        "length_of_another_block",
        "The buffer was made for another block than the one that arrives. In step t the block of rank − t is here and leaves; "
        "what comes is that of rank − t − 1: lengths[ring.origin(step + 1)].",
    ),
    Misconception(
        "leaves_with_nothing",
        "A rank with no tokens left the ring, or held back a block that is empty. Its neighbours wait all the same: every rank makes "
        "P − 1 exchanges, and an empty block is a message too.",
    ),
    Misconception(
        "swaps_keys_and_values",
        "Some ranks hold K for V and V for K: they were sent one by one, in an order that is not the same on all ranks. Tags, shapes and "
        "dtypes agree, so nothing can notice. Send them together, in one exchange.",
        _swapped,
    ),
    Misconception(
        "pads_to_the_longest",
        "Blocks travel padded to the longest shard: more bytes than there are tokens. Let each block travel in its own length.",
    ),
    Misconception(
        "talks_too_much",
        "More bytes travel than K, V and the lengths take. Telling a length takes 8 bytes; send each block P − 1 times around, "
        "unpadded, in the dtype and with the heads it came with.",
    ),
    Misconception(
        "counts_padding",
        "Keys that do not exist were counted: a padded block was attended to as a whole. Rows of zeros are keys with score 0, "
        "weight e⁰ = 1 before the division, and are no empty space.",
        _padded,
    ),
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
