"""Common mistakes in the kernel of one ring step, each with the answer that it computes in float64."""

from __future__ import annotations

from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("12")


def _makes(name: str) -> Misconception:
    """Return the mistake `name`, which the emulation of a case makes under the same name."""
    return mistake(name, lambda case: case.answer((name,)))


NAN_IN_BLIND_ROWS = mistake("nan_in_blind_rows")
DIVIDES_BY_ZERO = mistake("divides_by_zero")
OVERFLOWS = mistake("overflows")
LOW_PRECISION_STATE = mistake("low_precision_state")
ROUNDED_BETWEEN_STEPS = mistake("state_rounded_between_steps")
FIRST_READS = mistake("first_step_reads_state")
LAST_WRITES_STATE = mistake("last_step_writes_state")
UNWRITTEN = mistake("unwritten_rows")
TOO_EARLY = mistake("writes_out_too_early")
READS_UNNAMED = mistake("reads_unnamed_keys")
SEVERAL_LAUNCHES = mistake("several_launches")
READS_TWICE = mistake("reads_twice")
HIDDEN_TILES = mistake("computes_hidden_tiles")
TAIL = _makes("tail_counts")
SHORT = _makes("drops_the_short_tile")
GROUP = _makes("wrong_group")

GROUP_FORGOTTEN = mistake("group_forgotten")
UNCHANGED = mistake("result_unchanged")
FOUR_COLUMNS = mistake("four_columns")

MASKS = (
    _makes("mask_ignored"),
    _makes("mask_inverted"),
    _makes("zero_for_hidden"),
    _makes("clamps_the_maximum"),
)

TILE = (
    *MASKS,
    _makes("key_scales_forgotten"),
    _makes("value_scales_forgotten"),
    _makes("value_scales_in_total"),
    _makes("value_scales_by_column"),
    _makes("scales_swapped"),
    _makes("normalises_every_tile"),
    _makes("acc_not_rescaled"),
    _makes("new_values_rescaled"),
    _makes("total_not_rescaled"),
    _makes("never_rescaled"),
    _makes("no_scale"),
    _makes("scaled_query_rounded"),
    _makes("natural_exponential"),
    NAN_IN_BLIND_ROWS,
    OVERFLOWS,
    LOW_PRECISION_STATE,
)

ENDS = (
    _makes("last_not_normalised"),
    _makes("lse_in_base_two"),
    _makes("lse_mixes_bases"),
    _makes("lse_is_the_maximum"),
    _makes("lse_taken_for_base_two"),
    _makes("lse_turned_twice"),
    _makes("result_weighs_nothing"),
    _makes("result_not_turned_into_a_sum"),
    _makes("acc_of_result_forgotten"),
    FIRST_READS,
    LAST_WRITES_STATE,
    UNWRITTEN,
    TOO_EARLY,
    DIVIDES_BY_ZERO,
)

STEP = (
    _makes("drops_the_state"),
    _makes("result_ignored"),
    _makes("normalises_every_step"),
    GROUP,
    GROUP_FORGOTTEN,
    _makes("base_without_length"),
    _makes("base_by_query_length"),
    _makes("scales_without_base"),
    UNCHANGED,
    TAIL,
    SHORT,
    ROUNDED_BETWEEN_STEPS,
    SEVERAL_LAUNCHES,
    READS_TWICE,
    *(each for each in TILE if each not in MASKS),
    *ENDS,
)

TABLE = (
    _makes("strictly_before"),
    _makes("no_lower_bound"),
    _makes("window_too_short"),
    _makes("row_of_the_program"),
    _makes("no_mask"),
    _makes("first_segment_only"),
    _makes("head_forgotten"),
    _makes("full_forgotten"),
    _makes("tail_forgotten"),
    _makes("keys_not_offset"),
    _makes("writes_foreign_rows"),
    READS_UNNAMED,
    HIDDEN_TILES,
    FOUR_COLUMNS,
    *MASKS,
    *STEP,
)
