"""Exercise 02: merge two partial results, update a streaming softmax, stream attention over blocks of keys."""

from __future__ import annotations

from ringlab.course.contract import Check, Exercise, Stage
from ringlab.course.contracts import e02_checks as checks
from ringlab.course.contracts import e02_mistakes as mistakes

MERGE = Stage(
    id="02.merge",
    function="merge",
    title="merge any number of partial results",
    hints=(
        "Which part should count more: the one with more keys, or the one with the larger sum of exponentials?",
        "Build the common lse with torch.logsumexp over the parts and weigh each out by e^(its own lse - the common lse). Ask what "
        "-inf - (-inf) is, and for which rows it happens.",
        "$L = \\ln \\sum_i e^{L_i},\\quad o = \\sum_i o_i e^{L_i - L}$, and $(0, -\\infty)$ where $L = -\\infty$",
    ),
    misconceptions=mistakes.MERGE,
    checks=(
        Check(
            "worked",
            2,
            "visible",
            "the example on paper: 24.205",
            checks.check_worked,
            ("averages", "adds", "weights_swapped", "winner_takes_all", "no_last_axis"),
        ),
        Check(
            "cut",
            2,
            "visible",
            "cut anywhere, merged: the softmax of the whole",
            checks.check_cut,
            ("lse_is_the_maximum",),
        ),
        Check(
            "empty",
            2,
            "visible",
            "a part that has seen no key changes nothing; such parts alone, or no part, give (0, -inf)",
            checks.check_empty,
            ("sigmoid_form", "empty_twice"),
        ),
        Check(
            "large",
            1,
            "visible",
            "lse of ±1000 neither overflows nor vanishes",
            checks.check_large,
            ("exp_of_lse", "log_of_one_plus_exp"),
        ),
        Check(
            "state",
            1,
            "visible",
            "the state is float32 at least, and float64 for float64",
            checks.check_state,
            ("state_in_bf16", "state_forced_to_float32"),
        ),
        Check(
            "order",
            1,
            "stress",
            "three parts, in any grouping and order",
            checks.check_order,
            ("keeps_b_lse",),
        ),
        Check(
            "many", 2, "held-out", "many parts, some without keys", checks.check_many, ("global_empty_guard",)
        ),
    ),
)

UPDATE = Stage(
    id="02.update",
    function="update",
    title="one step of a streaming softmax",
    hints=(
        "total and acc are sums of e^(s - m). What happens to them when m becomes larger?",
        "New maximum first. Then one factor for everything old, and the new block's terms against the new maximum.",
        "$m' = \\max(m, \\max_j s_j),\\ \\ell' = \\ell e^{m-m'} + \\sum_j e^{s_j-m'},\\ a' = a e^{m-m'} + \\sum_j e^{s_j-m'} v_j$",
    ),
    misconceptions=mistakes.UPDATE,
    checks=(
        Check(
            "first",
            1,
            "visible",
            "the first block",
            checks.check_first,
            ("normalises_acc", "rows_share_a_maximum"),
        ),
        Check(
            "rise",
            2,
            "visible",
            "the maximum rises: what is old shrinks",
            checks.check_rise,
            ("never_rescales", "acc_not_rescaled", "rescales_upside_down"),
        ),
        Check(
            "fall",
            1,
            "visible",
            "the maximum stays: what is old stays",
            checks.check_fall,
            ("maximum_of_the_block", "block_against_its_own"),
        ),
        Check(
            "hidden",
            2,
            "visible",
            "a row that has seen no key yet",
            checks.check_hidden,
            ("nothing_seen_is_nan",),
        ),
        Check(
            "blocks",
            2,
            "held-out",
            "many blocks, large scores, hidden keys",
            checks.check_blocks,
            ("clamps_the_maximum",),
        ),
    ),
)

STREAM = Stage(
    id="02.stream",
    function="streaming_attention",
    title="attention, one block of keys at a time",
    helpers=("merge", "update"),
    hints=(
        "What must be known about the blocks seen so far, and what may be forgotten?",
        "Start from the state that has seen nothing, loop over blocks with update (or merge), divide once at the end. "
        "Slicing past the end of a tensor stops by itself.",
        "$(m, \\ell, a) = (-\\infty, 0, 0) \\to \\dots,\\quad \\mathrm{out} = a/\\ell,\\quad \\mathrm{lse} = m + \\ln \\ell$",
    ),
    misconceptions=mistakes.STREAM,
    checks=(
        Check(
            "small",
            2,
            "visible",
            "out and lse, whatever the block",
            checks.check_stream_small,
            ("mean_of_blocks", "no_scale", "never_divides"),
        ),
        Check(
            "ragged",
            1,
            "visible",
            "a last block that is shorter",
            checks.check_stream_ragged,
            ("drops_the_last_block",),
        ),
        Check(
            "memory",
            2,
            "visible",
            "one block of scores at a time",
            checks.check_stream_memory,
            ("whole_row_at_once",),
            kind="cost",
        ),
        Check(
            "bf16", 2, "visible", "bfloat16 in, float32 state", checks.check_stream_bf16, ("streams_in_bf16",)
        ),
        Check("sharp", 1, "stress", "large scores", checks.check_stream_sharp, ("scores_not_stable",)),
        Check(
            "any", 2, "held-out", "other lengths and blocks", checks.check_stream_any, ("one_query_head_dim",)
        ),
    ),
)

EXERCISE = Exercise("02", "02_online_softmax", "Merge and stream", (MERGE, UPDATE, STREAM))
