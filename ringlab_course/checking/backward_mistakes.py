"""The common mistakes of the backward ring that change its values, by name."""

from __future__ import annotations

from ringlab_course.checking.wrong_answers import mistakes_of

NAMES = """
goes_the_other_way ends_at_the_neighbour one_hop_too_far gradients_stay owner_alone last_rank_alone
drops_own_block couriers_start_empty drops_last_block counts_to_three dq_of_the_last_block
counts_what_was_sent averages_the_ranks swaps_dk_and_dv scales_dq_again lse_of_the_block no_delta
narrow_couriers no_mask local_mask assumes_contiguous strictly_before sees_the_future
origin_plus_step never_uses_the_visitor sends_own_block_again
"""

COMPARED = tuple(map(mistakes_of("09.couriers"), NAMES.split()))
